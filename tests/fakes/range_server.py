"""A broker that serves only plans and ReadRange of one topic, with the faults that a test sets."""

from __future__ import annotations

import queue
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from magnetar.protos import broker_pb2 as pb
from magnetar.protos.entry import with_broker_metadata
from magnetar.protos.message import EntryHeader, OutgoingMessage, encode_batch
from magnetar.runtime.grpc_frames import encode_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RECORD = struct.Struct(">qqI")


@dataclass
class Topic:
    """Stored entries by ledger; the same topic may be served by several servers."""

    ledgers: dict[int, list[bytes]] = field(default_factory=dict)
    messages: int = 0
    publish_ms: int = 1_700_000_000_000  # of the next batch

    def add_batch(self, ledger: int, *values: bytes) -> None:
        batch = [OutgoingMessage(value, sequence_id=n) for n, value in enumerate(values)]
        self.messages += len(values)
        entry = b"".join(encode_batch(batch, EntryHeader("p", self.publish_ms)))
        stored = with_broker_metadata(entry, broker_timestamp_ms=5, index=self.messages - 1)
        self.ledgers.setdefault(ledger, []).append(stored)


@dataclass
class RangeServer:
    topic: Topic | None  # None: TopicNotFound
    url: str = ""
    owner: str = ""  # non-empty: the server redirects to this address
    frame_entries: int = 3
    missing: str = "RangeDeleted: there is no such entry"  # the error of a read beyond a ledger
    reads: list[tuple[int, int, int]] = field(default_factory=list)  # ledger, first, last
    plans: int = 0
    finds: int = 0
    absent: frozenset[str] = frozenset()  # topics that FindTopics does not find
    # The copies of each requested ledger; without bookies there are none.
    bookies: list[pb.BookieData] = field(default_factory=list)
    copies: Callable[[int], pb.LedgerCopies] = lambda ledger: pb.LedgerCopies(ledger=ledger)
    copies_asked: list[int] = field(default_factory=list)  # ledgers of each request
    watched: list[dict[str, int]] = field(default_factory=list)  # topics -> first ledger
    topic_watches: list[list[str]] = field(default_factory=list)  # the topics of each call
    # What a watch of topics sends, in the same way.
    found: queue.Queue[pb.TopicsUpdate | None] | None = None
    # What the watch of one namespace or topic sends instead, by its name.
    found_in: dict[str, queue.Queue[pb.TopicsUpdate | None]] = field(default_factory=dict)
    noted: list[list[str]] = field(default_factory=list)  # the topics of each call
    note_errors: dict[str, str] = field(default_factory=dict)  # topic -> the error of its note
    # The updates that a watch sends; None ends it. Without a queue the server is an older broker.
    pushes: queue.Queue[pb.PositionsUpdate | None] | None = None
    # Called before each frame of a read with the frames sent so far in it; may abort the call or
    # return another frame.
    before_frame: Callable[[int, grpc.ServicerContext, bytes], bytes] = lambda sent, call, frame: (
        frame
    )
    # Called before each plan; may abort it.
    before_plan: Callable[[grpc.ServicerContext], None] = lambda call: None
    # Called before each search of an entry; may abort it.
    before_entry: Callable[[grpc.ServicerContext], object] = lambda call: None

    def plan(self, request: bytes, call: grpc.ServicerContext) -> bytes:
        self.plans += 1
        self.before_plan(call)
        if self.owner:
            return pb.PlanRangeReply(owner_url=self.owner).SerializeToString()
        reply = pb.PlanRangeReply(exists=self.topic is not None)
        for ledger, entries in (self.topic.ledgers if self.topic else {}).items():
            reply.ledgers.add(
                ledger=ledger, last_entry=len(entries) - 1, bytes=sum(map(len, entries))
            )
        return reply.SerializeToString()

    def find(self, request: bytes, call: grpc.ServicerContext) -> bytes:
        self.finds += 1
        asked = pb.FindTopicsRequest.FromString(request)
        reply = pb.FindTopicsReply()
        for topic in asked.topics:
            (reply.missing if topic in self.absent else reply.topics).append(topic)
        return reply.SerializeToString()

    def plan_topics(self, request: bytes, call: grpc.ServicerContext) -> bytes:
        reply = pb.PlanTopicsReply(bookies=self.bookies)
        asked = pb.PlanTopicsRequest.FromString(request)
        self.copies_asked.append(sum(len(topic.copies_of) for topic in asked.topics))
        for topic in asked.topics:
            plan = pb.PlanRangeReply.FromString(self.plan(b"", call))
            messages = self.topic.messages if self.topic else 0
            reply.topics.add(
                owner_url=plan.owner_url,
                exists=plan.exists,
                ledgers=plan.ledgers,
                next_index=messages,
                copies=map(self.copies, topic.copies_of) if self.bookies else (),
            )
        return reply.SerializeToString()

    def push(self, place: int = 0, *, from_ledger: int = 0, first_ledger: int = 0) -> None:
        """Push the state of the topic."""
        call: Any = None
        plan = pb.PlanTopicsReply.FromString(
            self.plan_topics(pb.PlanTopicsRequest(topics=[pb.TopicAsk()]).SerializeToString(), call)
        ).topics[0]
        self.plans -= 1
        kept = [ledger for ledger in plan.ledgers if ledger.ledger >= from_ledger]
        plan.ClearField("ledgers")
        plan.ledgers.extend(kept)
        update = pb.TopicUpdate(
            topic=place, plan=plan, from_ledger=from_ledger, first_ledger=first_ledger
        )
        assert self.pushes is not None
        self.pushes.put(pb.PositionsUpdate(topics=[update]))

    def watch(self, request: bytes, call: grpc.ServicerContext) -> Iterator[bytes]:
        asked = pb.WatchPositionsRequest.FromString(request)
        self.watched.append({it.topic: it.from_ledger for it in asked.topics})
        return _pushed(self.pushes, call)

    def watch_topics(self, request: bytes, call: grpc.ServicerContext) -> Iterator[bytes]:
        asked = pb.FindTopicsRequest.FromString(request)
        names = [*asked.topics, *asked.namespaces]
        self.topic_watches.append(names)
        return _pushed(self.found_in.get(names[0], self.found), call)

    def find_entry(self, request: bytes, call: grpc.ServicerContext) -> bytes:
        """Only for an index, and for a topic whose entries hold one message each."""
        self.before_entry(call)
        assert self.topic is not None
        index = pb.FindEntryRequest.FromString(request).index
        ledgers = self.topic.ledgers.items()
        entries = [(ledger, entry) for ledger, part in ledgers for entry in range(len(part))]
        ledger, entry = entries[index]
        reply = pb.FindEntryReply(exists=True, ledger=ledger, entry=entry, first_index=index)
        return reply.SerializeToString()

    def note(self, request: bytes, call: grpc.ServicerContext) -> bytes:
        asked = pb.NoteBatchesRequest.FromString(request)
        self.noted.append([it.topic for it in asked.topics])
        notes = [
            pb.NotedTopic(error=self.note_errors[it.topic])
            if it.topic in self.note_errors
            else pb.NotedTopic(owner_url=self.owner)
            for it in asked.topics
        ]
        return pb.NoteBatchesReply(topics=notes).SerializeToString()

    def read(self, request: bytes, call: grpc.ServicerContext) -> Iterator[bytes]:
        asked = pb.ReadRangeRequest.FromString(request)
        self.reads.append((asked.ledger, asked.first_entry, asked.last_entry))
        if self.owner:
            call.abort(grpc.StatusCode.ABORTED, "NotOwner: the topic is not served here")
        assert self.topic is not None
        entries = self.topic.ledgers.get(asked.ledger, [])
        if asked.last_entry >= len(entries):
            call.abort(grpc.StatusCode.ABORTED, self.missing)
        ids = range(asked.first_entry, asked.last_entry + 1)
        for sent, at in enumerate(range(0, len(ids), self.frame_entries)):
            frame = b"".join(
                RECORD.pack(asked.ledger, entry, len(entries[entry])) + entries[entry]
                for entry in ids[at : at + self.frame_entries]
            )
            yield encode_frame([self.before_frame(sent, call, frame)])


def _pushed(pushes: queue.Queue[Any] | None, call: grpc.ServicerContext) -> Iterator[bytes]:
    if pushes is None:
        call.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    while call.is_active():
        try:
            update = pushes.get(timeout=0.01)
        except queue.Empty:
            continue
        if update is None:
            return
        yield update.SerializeToString()


@contextmanager
def serving(
    server: RangeServer, credentials: grpc.ServerCredentials | None = None
) -> Iterator[RangeServer]:
    """Serve on a free port; `server.url` has it. `credentials`: for TLS."""
    grpc_server = grpc.server(ThreadPoolExecutor(8))
    methods: dict[str, Any] = {
        "PlanRange": grpc.unary_unary_rpc_method_handler(server.plan),
        "FindTopics": grpc.unary_unary_rpc_method_handler(server.find),
        "WatchTopics": grpc.unary_stream_rpc_method_handler(server.watch_topics),
        "PlanTopics": grpc.unary_unary_rpc_method_handler(server.plan_topics),
        "WatchPositions": grpc.unary_stream_rpc_method_handler(server.watch),
        "FindEntry": grpc.unary_unary_rpc_method_handler(server.find_entry),
        "NoteBatches": grpc.unary_unary_rpc_method_handler(server.note),
        "ReadRange": grpc.unary_stream_rpc_method_handler(server.read),
    }
    handler = grpc.method_handlers_generic_handler("magnetar.broker.Broker", methods)
    grpc_server.add_generic_rpc_handlers((handler,))
    if credentials is None:
        server.url = f"grpc://127.0.0.1:{grpc_server.add_insecure_port('127.0.0.1:0')}"
    else:
        port = grpc_server.add_secure_port("127.0.0.1:0", credentials)
        server.url = f"grpcs://localhost:{port}"
    grpc_server.start()
    try:
        yield server
    finally:
        grpc_server.stop(0).wait()
