"""protos/pulsar.proto compared with an independent copy of the protocol's tables.

The table below was taken from a description of Pulsar's protocol, not from our file: a wrong
number, label, type or default in one of them fails the comparison. `!` required, `?` optional, `*`
repeated; a type that the description leaves out is not compared.
"""

import re
from typing import Any

import pytest

from magnetar.protos import pulsar_pb2 as pb

TABLE = """
KeyValue: key=1! string, value=2! string
KeyLongValue: key=1! string, value=2! uint64
IntRange: start=1! int32, end=2! int32
EncryptionKeys: key=1! string, value=2! bytes, metadata=3* KeyValue
AuthData: auth_method_name=1? string, auth_data=2? bytes
Schema: name=1! string, schema_data=3! bytes, type=4! enum, properties=5* KeyValue
MessageIdData: ledgerId=1! uint64, entryId=2! uint64, partition=3? int32(-1),
    batch_index=4? int32(-1), ack_set=5* int64, batch_size=6? int32,
    first_chunk_message_id=7? MessageIdData
MessageMetadata: producer_name=1! string, sequence_id=2! uint64, publish_time=3! uint64,
    properties=4* KeyValue, replicated_from=5? string, partition_key=6? string,
    replicate_to=7* string, compression=8? enum(0), uncompressed_size=9? uint32(0),
    num_messages_in_batch=11? int32(1), event_time=12? uint64(0),
    encryption_keys=13* EncryptionKeys, encryption_algo=14? string, encryption_param=15? bytes,
    schema_version=16? bytes,
    partition_key_b64_encoded=17? bool(0), ordering_key=18? bytes, deliver_at_time=19? int64,
    marker_type=20? int32, txnid_least_bits=22? uint64, txnid_most_bits=23? uint64,
    highest_sequence_id=24? uint64(0), null_value=25? bool(0), uuid=26? string,
    num_chunks_from_msg=27? int32, total_chunk_msg_size=28? int32, chunk_id=29? int32,
    null_partition_key=30? bool(0), compacted_batch_indexes=31* int32, schema_id=32? bytes,
    entry_hash_min=33? uint32, entry_hash_max=34? uint32
SingleMessageMetadata: properties=1* KeyValue, partition_key=2? string, payload_size=3! int32,
    compacted_out=4? bool(0), event_time=5? uint64(0), partition_key_b64_encoded=6? bool(0),
    ordering_key=7? bytes, sequence_id=8? uint64, null_value=9? bool(0),
    null_partition_key=10? bool(0)
BrokerEntryMetadata: broker_timestamp=1? uint64, index=2? uint64
CommandConnect: client_version=1! string, auth_method=2? enum, auth_data=3? bytes,
    protocol_version=4? int32(0), auth_method_name=5? string, proxy_to_broker_url=6? string,
    original_principal=7? string, original_auth_data=8? string, original_auth_method=9? string,
    feature_flags=10? FeatureFlags, proxy_version=11? string
FeatureFlags: supports_auth_refresh=1? bool(0), supports_broker_entry_metadata=2? bool(0),
    supports_partial_producer=3? bool(0), supports_topic_watchers=4? bool(0),
    supports_get_partitioned_metadata_without_auto_creation=5? bool(0),
    supports_repl_dedup_by_lid_and_eid=6? bool(0), supports_topic_watcher_reconcile=7? bool(0),
    supports_scalable_topics=8? bool(0), supports_tc_metadata_discovery=9? bool(0),
    supports_drain_consumer=10001? bool(0), supports_ordered_negative_acks=10002? bool(0)
CommandConnected: server_version=1! string, protocol_version=2? int32, max_message_size=3? int32,
    feature_flags=4? FeatureFlags
CommandAuthChallenge: server_version=1?, challenge=2? AuthData, protocol_version=3?
CommandAuthResponse: client_version=1?, response=2? AuthData, protocol_version=3?
CommandPing:
CommandPong:
CommandSuccess: request_id=1! uint64, schema=2? Schema
CommandError: request_id=1! uint64, error=2! enum, message=3! string
CommandPartitionedTopicMetadata: topic=1! string, request_id=2! uint64, original_principal=3?,
    original_auth_data=4?, original_auth_method=5? string,
    metadata_auto_creation_enabled=6? bool(1)
CommandPartitionedTopicMetadataResponse: partitions=1? uint32, request_id=2! uint64,
    response=3? enum, error=4? enum, message=5? string
CommandLookupTopic: topic=1! string, request_id=2!, authoritative=3? bool(0),
    original_principal=4?, original_auth_data=5?, original_auth_method=6? string,
    advertised_listener_name=7? string, properties=8* KeyValue
CommandLookupTopicResponse: brokerServiceUrl=1? string, brokerServiceUrlTls=2? string,
    response=3? enum, request_id=4!, authoritative=5? bool(0), error=6?, message=7?,
    proxy_through_service_url=8? bool(0)
CommandGetTopicsOfNamespace: request_id=1!, namespace=2! string, mode=3? enum(0),
    topics_pattern=4?, topics_hash=5?, properties=6*
CommandGetTopicsOfNamespaceResponse: request_id=1!, topics=2* string, filtered=3? bool(0),
    topics_hash=4? string, changed=5? bool(1)
CommandWatchTopicList: request_id=1!, watcher_id=2!, namespace=3! string, topics_pattern=4! string,
    topics_hash=5?
CommandWatchTopicListSuccess: request_id=1!, watcher_id=2!, topic=3* string, topics_hash=4!
CommandWatchTopicUpdate: watcher_id=1!, new_topics=2*, deleted_topics=3*, topics_hash=4!
CommandWatchTopicListClose: request_id=1!, watcher_id=2!
CommandDrainConsumer: consumer_id=1! uint64, request_id=2! uint64
CommandNegativeAck: consumer_id=1! uint64, request_id=2! uint64, message_ids=3* MessageIdData,
    returned=4* MessageIdData
CommandTopicMigrated: resource_id=1! uint64, resource_type=2! enum, brokerServiceUrl=3?,
    brokerServiceUrlTls=4?
CommandProducer: topic=1! string, producer_id=2! uint64, request_id=3!, producer_name=4? string,
    encrypted=5? bool, metadata=6* KeyValue, schema=7? Schema, epoch=8? uint64(0),
    user_provided_producer_name=9? bool(1), producer_access_mode=10? enum(0),
    topic_epoch=11? uint64, txn_enabled=12? bool, initial_subscription_name=13? string,
    stops_at_refusal=10001? bool(0)
CommandProducerSuccess: request_id=1!, producer_name=2! string, last_sequence_id=3? int64(-1),
    schema_version=4? bytes, topic_epoch=5? uint64, producer_ready=6? bool(1)
CommandSend: producer_id=1! uint64, sequence_id=2! uint64, num_messages=3? int32(1),
    txnid_least_bits=4?, txnid_most_bits=5? uint64(0), highest_sequence_id=6? uint64(0),
    is_chunk=7? bool, marker=8? bool, message_id=9? MessageIdData
CommandSendReceipt: producer_id=1!, sequence_id=2!, message_id=3? MessageIdData,
    highest_sequence_id=4?
CommandSendError: producer_id=1!, sequence_id=2!, error=3!, message=4! string
CommandCloseProducer: producer_id=1!, request_id=2!, assignedBrokerServiceUrl=3?,
    assignedBrokerServiceUrlTls=4?
CommandSubscribe: topic=1! string, subscription=2! string, subType=3! enum, consumer_id=4!,
    request_id=5!, consumer_name=6? string, priority_level=7? int32, durable=8? bool(1),
    start_message_id=9? MessageIdData, metadata=10* KeyValue, read_compacted=11? bool,
    schema=12? Schema, initialPosition=13? enum(0), replicate_subscription_state=14? bool,
    force_topic_creation=15? bool(1), start_message_rollback_duration_sec=16? uint64(0),
    keySharedMeta=17? KeySharedMeta, subscription_properties=18* KeyValue, consumer_epoch=19? uint64
KeySharedMeta: keySharedMode=1! enum, hashRanges=3* IntRange, allowOutOfOrderDelivery=4? bool(0),
    ordered_negative_acks=10001? bool(0)
CommandActiveConsumerChange: consumer_id=1!, is_active=2? bool
CommandFlow: consumer_id=1!, messagePermits=2! uint32
CommandUnsubscribe: consumer_id=1!, request_id=2!, force=3? bool
CommandCloseConsumer: consumer_id=1!, request_id=2!, assignedBrokerServiceUrl=3?,
    assignedBrokerServiceUrlTls=4?
CommandMessage: consumer_id=1!, message_id=2! MessageIdData, redelivery_count=3? uint32(0),
    ack_set=4* int64, consumer_epoch=5? uint64
CommandAck: consumer_id=1!, ack_type=2! enum, message_id=3* MessageIdData,
    validation_error=4? enum, properties=5* KeyLongValue, txnid_least_bits=6?,
    txnid_most_bits=7? uint64(0), request_id=8? uint64
CommandAckResponse: consumer_id=1!, txnid_least_bits=2?, txnid_most_bits=3?, error=4?, message=5?,
    request_id=6?
CommandRedeliverUnacknowledgedMessages: consumer_id=1!, message_ids=2* MessageIdData,
    consumer_epoch=3? uint64
CommandSeek: consumer_id=1!, request_id=2!, message_id=3?, message_publish_time=4? uint64
CommandGetLastMessageId: consumer_id=1!, request_id=2!
CommandGetLastMessageIdResponse: last_message_id=1! MessageIdData, request_id=2!,
    consumer_mark_delete_position=3? MessageIdData
CommandConsumerStats: request_id=1!, consumer_id=4!
CommandConsumerStatsResponse: request_id=1!, error_code=2?, error_message=3?, msgRateOut=4? double,
    msgThroughputOut=5? double, msgRateRedeliver=6? double, consumerName=7? string,
    availablePermits=8? uint64, unackedMessages=9? uint64, blockedConsumerOnUnackedMsgs=10? bool,
    address=11? string, connectedSince=12? string, type=13? string, msgRateExpired=14? double,
    msgBacklog=15? uint64, messageAckRate=16? double
CommandReachedEndOfTopic: consumer_id=1!
CommandGetSchema: request_id=1!, topic=2! string, schema_version=3? bytes
CommandGetSchemaResponse: request_id=1!, error_code=2?, error_message=3?, schema=4?,
    schema_version=5? bytes
CommandGetOrCreateSchema: request_id=1!, topic=2!, schema=3!, producerName=4? string
CommandGetOrCreateSchemaResponse: request_id=1!, error_code=2?, error_message=3?,
    schema_version=4? bytes
Subscription: topic=1! string, subscription=2! string
CommandTcClientConnectRequest: request_id=1!, tc_id=2! uint64(0), scalable=3? bool
CommandTcClientConnectResponse: request_id=1!, error=2?, message=3?
CommandNewTxn: request_id=1!, txn_ttl=2? uint64(0), tc_id=3? uint64(0), scalable=4?
CommandNewTxnResponse: request_id=1!, txnid_least_bits=2? uint64(0), txnid_most_bits=3? uint64(0),
    error=4?, message=5?
CommandAddPartitionToTxn: request_id=1!, txnid_least_bits=2?, txnid_most_bits=3?,
    partitions=4* string, scalable=5?
CommandAddPartitionToTxnResponse: request_id=1!, txnid_least_bits=2? uint64(0),
    txnid_most_bits=3? uint64(0), error=4?, message=5?
CommandAddSubscriptionToTxn: request_id=1!, txnid_least_bits=2?, txnid_most_bits=3?,
    subscription=4* Subscription, scalable=5?
CommandAddSubscriptionToTxnResponse: request_id=1!, txnid_least_bits=2? uint64(0),
    txnid_most_bits=3? uint64(0), error=4?, message=5?
CommandEndTxn: request_id=1!, txnid_least_bits=2?, txnid_most_bits=3?, txn_action=4? enum,
    scalable=5?
CommandEndTxnResponse: request_id=1!, txnid_least_bits=2? uint64(0), txnid_most_bits=3? uint64(0),
    error=4?, message=5?
CommandEndTxnOnPartition: request_id=1!, txnid_least_bits=2?, txnid_most_bits=3?, topic=4? string,
    txn_action=5?, txnid_least_bits_of_low_watermark=6? uint64
CommandEndTxnOnPartitionResponse: request_id=1!, txnid_least_bits=2? uint64(0),
    txnid_most_bits=3? uint64(0), error=4?, message=5?
CommandEndTxnOnSubscription: request_id=1!, txnid_least_bits=2?, txnid_most_bits=3?,
    subscription=4? Subscription, txn_action=5?, txnid_least_bits_of_low_watermark=6? uint64
CommandEndTxnOnSubscriptionResponse: request_id=1!, txnid_least_bits=2? uint64(0),
    txnid_most_bits=3? uint64(0), error=4?, message=5?
"""

COMMANDS = """
2 CONNECT connect | 3 CONNECTED connected | 4 SUBSCRIBE subscribe | 5 PRODUCER producer
6 SEND send | 7 SEND_RECEIPT send_receipt | 8 SEND_ERROR send_error | 9 MESSAGE message
10 ACK ack | 11 FLOW flow | 12 UNSUBSCRIBE unsubscribe | 13 SUCCESS success | 14 ERROR error
15 CLOSE_PRODUCER close_producer | 16 CLOSE_CONSUMER close_consumer
17 PRODUCER_SUCCESS producer_success | 18 PING ping | 19 PONG pong
20 REDELIVER_UNACKNOWLEDGED_MESSAGES redeliverUnacknowledgedMessages
21 PARTITIONED_METADATA partitionMetadata
22 PARTITIONED_METADATA_RESPONSE partitionMetadataResponse | 23 LOOKUP lookupTopic
24 LOOKUP_RESPONSE lookupTopicResponse | 25 CONSUMER_STATS consumerStats
26 CONSUMER_STATS_RESPONSE consumerStatsResponse | 27 REACHED_END_OF_TOPIC reachedEndOfTopic
28 SEEK seek | 29 GET_LAST_MESSAGE_ID getLastMessageId
30 GET_LAST_MESSAGE_ID_RESPONSE getLastMessageIdResponse
31 ACTIVE_CONSUMER_CHANGE active_consumer_change | 32 GET_TOPICS_OF_NAMESPACE getTopicsOfNamespace
33 GET_TOPICS_OF_NAMESPACE_RESPONSE getTopicsOfNamespaceResponse | 34 GET_SCHEMA getSchema
35 GET_SCHEMA_RESPONSE getSchemaResponse | 36 AUTH_CHALLENGE authChallenge
37 AUTH_RESPONSE authResponse | 38 ACK_RESPONSE ackResponse
39 GET_OR_CREATE_SCHEMA getOrCreateSchema
40 GET_OR_CREATE_SCHEMA_RESPONSE getOrCreateSchemaResponse | 50 NEW_TXN newTxn
51 NEW_TXN_RESPONSE newTxnResponse | 52 ADD_PARTITION_TO_TXN addPartitionToTxn
53 ADD_PARTITION_TO_TXN_RESPONSE addPartitionToTxnResponse
54 ADD_SUBSCRIPTION_TO_TXN addSubscriptionToTxn
55 ADD_SUBSCRIPTION_TO_TXN_RESPONSE addSubscriptionToTxnResponse | 56 END_TXN endTxn
57 END_TXN_RESPONSE endTxnResponse | 58 END_TXN_ON_PARTITION endTxnOnPartition
59 END_TXN_ON_PARTITION_RESPONSE endTxnOnPartitionResponse
60 END_TXN_ON_SUBSCRIPTION endTxnOnSubscription
61 END_TXN_ON_SUBSCRIPTION_RESPONSE endTxnOnSubscriptionResponse
62 TC_CLIENT_CONNECT_REQUEST tcClientConnectRequest
63 TC_CLIENT_CONNECT_RESPONSE tcClientConnectResponse | 64 WATCH_TOPIC_LIST watchTopicList
65 WATCH_TOPIC_LIST_SUCCESS watchTopicListSuccess | 66 WATCH_TOPIC_UPDATE watchTopicUpdate
67 WATCH_TOPIC_LIST_CLOSE watchTopicListClose | 68 TOPIC_MIGRATED topicMigrated
10001 DRAIN_CONSUMER drainConsumer | 10002 NEGATIVE_ACK negativeAck
"""

ENUMS = {
    pb.ServerError: """UnknownError MetadataError PersistenceError AuthenticationError
        AuthorizationError ConsumerBusy ServiceNotReady ProducerBlockedQuotaExceededError
        ProducerBlockedQuotaExceededException ChecksumError UnsupportedVersionError TopicNotFound
        SubscriptionNotFound ConsumerNotFound TooManyRequests TopicTerminatedError ProducerBusy
        InvalidTopicName IncompatibleSchema ConsumerAssignError TransactionCoordinatorNotFound
        InvalidTxnStatus NotAllowedError TransactionConflict TransactionNotFound ProducerFenced""",
    pb.CompressionType: "NONE LZ4 ZLIB ZSTD SNAPPY",
    pb.ProducerAccessMode: "Shared Exclusive WaitForExclusive ExclusiveWithFencing",
    pb.CommandSubscribe.SubType: "Exclusive Shared Failover Key_Shared",
    pb.CommandSubscribe.InitialPosition: "Latest Earliest",
    pb.KeySharedMode: "AUTO_SPLIT STICKY",
    pb.CommandAck.AckType: "Individual Cumulative",
    pb.CommandAck.ValidationError: """UncompressedSizeCorruption DecompressionError
        ChecksumMismatch BatchDeSerializeError DecryptionError""",
    pb.AuthMethod: "AuthMethodNone AuthMethodYcaV1 AuthMethodAthens",
    pb.TxnAction: "COMMIT ABORT",
    pb.CommandPartitionedTopicMetadataResponse.LookupType: "Success Failed",
    pb.CommandLookupTopicResponse.LookupType: "Redirect Connect Failed",
    pb.CommandGetTopicsOfNamespace.Mode: "PERSISTENT NON_PERSISTENT ALL",
    pb.CommandTopicMigrated.ResourceType: "Producer Consumer",
    pb.ProtocolVersion: " ".join(f"v{number}" for number in range(22)),
    # Pulsar calls the first one None, which is a keyword of Python.
    pb.Schema.Type: """Bytes String Json Protobuf Avro Bool Int8 Int16 Int32 Int64 Float Double Date
        Time Timestamp KeyValue Instant LocalDate LocalTime LocalDateTime ProtobufNative AutoConsume
        External""",
}

LABELS = {"!": "required", "?": "optional", "*": "repeated"}
ROWS = dict(
    re.findall(r"^(\w+): ?((?:.|\n(?! *\w+:|$))*)", TABLE, flags=re.MULTILINE),
)
FIELD = re.compile(r"(\w+)=(\d+)([!?*])(?: (\w+)(?:\((-?\d+)\))?)?")


def described(field: Any) -> tuple[str, str, str]:
    """A field's label, type and default, as the table names them."""
    kinds = {
        getattr(field, name): name.removeprefix("TYPE_").lower()
        for name in dir(field)
        if name.startswith("TYPE_")
    }
    kind = field.message_type.name if field.message_type else kinds[field.type]
    default = str(int(field.default_value)) if field.has_default_value else ""
    label = "repeated" if field.is_repeated else "required" if field.is_required else "optional"
    return label, kind, default


@pytest.mark.parametrize("name", sorted(ROWS))
def test_fields_are_those_of_the_table(name: str) -> None:
    descriptor = pb.DESCRIPTOR.message_types_by_name[name]
    rows = FIELD.findall(ROWS[name])
    assert {(row[0], int(row[1])) for row in rows} == {
        (f.name, f.number) for f in descriptor.fields
    }
    for field_name, _, label, kind, default in rows:
        field = descriptor.fields_by_name[field_name]
        found_label, found_kind, found_default = described(field)
        assert found_label == LABELS[label], field_name
        if kind:
            assert found_kind == kind, field_name
        if default:
            # an absent field without a default also reads as false or 0
            assert found_default == default or (default == "0" and not found_default), field_name


def test_the_table_is_complete() -> None:
    assert set(ROWS) | {"BaseCommand"} == set(pb.DESCRIPTOR.message_types_by_name)


def test_commands_are_those_of_the_table() -> None:
    rows = re.findall(r"(\d+) (\w+) (\w+)", COMMANDS)
    assert {name: int(number) for number, name, _ in rows} == dict(pb.BaseCommand.Type.items())
    fields = {field.name: field.number for field in pb.BaseCommand.DESCRIPTOR.fields}
    assert {name: int(number) for number, _, name in rows} | {"type": 1} == fields


@pytest.mark.parametrize("enum", ENUMS, ids=lambda enum: enum.DESCRIPTOR.name)
def test_enums_are_those_of_the_table(enum: Any) -> None:
    assert list(enum.items()) == [(name, n) for n, name in enumerate(ENUMS[enum].split())]


def test_repeated_numbers_are_not_packed() -> None:
    """The default in proto2 is unpacked, and Pulsar's code generators write numbers so."""
    message_id = pb.MessageIdData(ledgerId=1, entryId=2, ack_set=[3, -1])
    assert message_id.SerializeToString() == bytes.fromhex("0801 1002 2803 28ffffffffffffffffff01")


def test_the_package_is_ours() -> None:
    assert pb.DESCRIPTOR.package == "magnetar.pulsar"
