#!/bin/bash
# Make stand-ins for the base images python:3.11-slim and zookeeper:3.9, under these names, for a
# machine whose Docker engine reaches no image registry. They have the interface of the official
# images (paths, users, variables, entrypoint), not their contents: use them for tests only.
#
#     tests/compose/stand_in_images.sh JARS_FOLDER
#
# JARS_FOLDER holds ZooKeeper's jars, for example .venv/lib/python3.11/site-packages/pyspark/jars.
# Needs root, debootstrap, a Debian mirror, and a JDK 17 with jlink. Takes about 150 s.
set -euo pipefail

DOCKER=${DOCKER:-docker}
JARS=${1:?the folder of ZooKeeper\'s jars}
JAVA_HOME=${JAVA_HOME:-$(dirname "$(dirname "$(readlink -f "$(command -v jlink)")")")}
HERE=$(cd "$(dirname "$0")" && pwd)
# The mirror that this machine's apt uses.
MIRROR=${MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -v security | head -1)}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
export DEBIAN_FRONTEND=noninteractive

slim() {  # remove what the official slim images leave out
    rm -rf "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/* "$1"/usr/share/{doc,man,info,locale} \
        "$1"/var/log/*.log "$1"/var/log/apt
    find "$1" -name __pycache__ -type d -prune -exec rm -rf {} +
}

base=$WORK/debian
debootstrap --variant=minbase --include=ca-certificates,netbase,tzdata bookworm "$base" "$MIRROR"
cp -a "$base" "$WORK/python"

# --- python:3.11-slim. The official image has Python in /usr/local; Debian's pip installs there.
python=$WORK/python
# pip in later builds trusts the certificates that this machine trusts.
cp -L /etc/ssl/certs/ca-certificates.crt "$python/etc/ssl/certs/ca-certificates.crt"
cp -L /etc/resolv.conf "$python/etc/resolv.conf"
chroot "$python" apt-get -q update
chroot "$python" apt-get -q install -y --no-install-recommends python3 python3-pip python3-venv
rm -f "$python"/usr/lib/python3*/EXTERNALLY-MANAGED
for name in python python3 python3.11; do ln -sf /usr/bin/python3.11 "$python/usr/local/bin/$name"; done
for name in pip pip3; do ln -sf /usr/bin/pip3 "$python/usr/local/bin/$name"; done
slim "$python"
tar -C "$python" -c . | "$DOCKER" import \
    --change 'ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8' \
    --change 'CMD ["python3"]' - python:3.11-slim

# --- zookeeper:3.9
zookeeper=$base
"$JAVA_HOME/bin/jlink" --strip-debug --no-header-files --no-man-pages --compress=2 \
    --output "$zookeeper/opt/java" --add-modules "$(tr -d '\n ' <<'MODULES'
java.base,java.logging,java.management,java.naming,java.security.jgss,java.security.sasl,java.xml,
java.sql,java.desktop,java.scripting,jdk.management,jdk.unsupported,jdk.crypto.ec,
jdk.security.auth,jdk.security.jgss
MODULES
)"
application=$zookeeper/apache-zookeeper-3.9-bin
mkdir -p "$application/lib" "$application/bin" "$zookeeper"/{conf,data,datalog,logs}
# Log4j writes ZooKeeper's log; the others are what the server loads at start.
for jar in zookeeper-3.9 zookeeper-jute-3.9 slf4j-api- log4j-api- log4j-core- log4j-slf4j2-impl- \
    netty-buffer- netty-codec- netty-common- netty-handler- netty-resolver- netty-transport- \
    metrics-core- snappy-java- commons-cli- commons-io- audience-annotations-; do
    cp "$JARS/$jar"*.jar "$application/lib/"
done
install -m 755 "$HERE/zookeeper/zkServer.sh" "$application/bin/zkServer.sh"
install -m 755 "$HERE/zookeeper/docker-entrypoint.sh" "$zookeeper/docker-entrypoint.sh"
install -m 644 "$HERE/zookeeper/log4j2.xml" "$zookeeper/conf/log4j2.xml"
chroot "$zookeeper" groupadd -g 1000 zookeeper
chroot "$zookeeper" useradd -u 1000 -g zookeeper -d /nonexistent -s /bin/bash zookeeper
chroot "$zookeeper" chown -R zookeeper:zookeeper /conf /data /datalog /logs
slim "$zookeeper"
tar -C "$zookeeper" -c . | "$DOCKER" import \
    --change 'ENV PATH=/opt/java/bin:/apache-zookeeper-3.9-bin/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 JAVA_HOME=/opt/java ZOO_CONF_DIR=/conf ZOO_DATA_DIR=/data ZOO_DATA_LOG_DIR=/datalog ZOO_LOG_DIR=/logs ZOO_TICK_TIME=2000 ZOO_INIT_LIMIT=5 ZOO_SYNC_LIMIT=2 ZOO_AUTOPURGE_PURGEINTERVAL=0 ZOO_AUTOPURGE_SNAPRETAINCOUNT=3 ZOO_MAX_CLIENT_CNXNS=60 ZOO_STANDALONE_ENABLED=true ZOO_ADMINSERVER_ENABLED=true' \
    --change 'WORKDIR /apache-zookeeper-3.9-bin' \
    --change 'VOLUME /data /datalog /logs' \
    --change 'EXPOSE 2181 2888 3888 8080' \
    --change 'ENTRYPOINT ["/docker-entrypoint.sh"]' \
    --change 'CMD ["zkServer.sh", "start-foreground"]' - zookeeper:3.9
