#!/bin/bash
# `zkServer.sh start-foreground`, as the distribution's script does it.
set -e
[[ $1 == start-foreground ]] || { echo "usage: zkServer.sh start-foreground" >&2; exit 2; }
folder=$(cd "$(dirname "$(readlink -f "$0")")/.." && pwd)
exec java -Xmx"${ZK_SERVER_HEAP:-1000}"m $JVMFLAGS $SERVER_JVMFLAGS \
    -cp "${ZOO_CONF_DIR:-/conf}:$folder/lib/*" \
    org.apache.zookeeper.server.quorum.QuorumPeerMain "$ZOO_CONF_DIR/zoo.cfg"
