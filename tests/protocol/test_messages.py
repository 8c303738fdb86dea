"""Messages of any content are encoded and decoded without loss, within bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.observability.events import (
    CallStarted,
    CheckpointWritten,
    DistributionBegan,
    JoinRequested,
    MessageMisunderstood,
    ScriptEnded,
    ScriptFailed,
    StrategyInstalled,
    TrainingEnded,
    WaitReported,
    WorkerConnectedLate,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
)
from lockstep.observability.measurements import GpuLoad, LoadMeasured, WorkerLoad
from lockstep.protocol import host
from lockstep.protocol.admin import StackReply, StackRequest, StopRequest
from lockstep.protocol.host import HostReport, Instruction
from lockstep.protocol.worker import (
    AbortExchange,
    AgentMessage,
    EventReport,
    FailureReport,
    HostMembers,
    LastLineAwaited,
    Leave,
    Notice,
    RelayedMessage,
    StateGiven,
    StateSource,
    ViewBroken,
    WorkerMessage,
)
from lockstep.transport.packet_channel import MAX_PACKET, MAX_TEXT, PacketDecoder, encode

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
workers = st.integers(0, 9)
groups = st.lists(workers).map(tuple)
relayed = st.one_of(
    st.builds(ViewBroken, workers, workers, texts, st.booleans()),
    st.builds(LastLineAwaited, workers),
    st.builds(
        EventReport,
        st.one_of(
            st.builds(WorkerReady, workers),
            st.builds(ScriptEnded, workers, workers),
            st.builds(JoinRequested, workers, st.booleans()),
            st.builds(WaitReported, workers, texts, groups, st.floats(0, 1e6)),
            st.builds(DistributionBegan),
            st.builds(CheckpointWritten, texts, st.integers(0, 2**53), st.floats(0, 1e6)),
            st.builds(StrategyInstalled, texts, st.dictionaries(texts, texts, max_size=3)),
            st.builds(TrainingEnded, st.integers(0, 2**53), texts, texts),
        ),
    ),
    st.builds(
        FailureReport,
        st.builds(ScriptFailed, workers, texts, texts),
        st.integers(0, 255),
        st.booleans(),
    ),
)
members = st.builds(HostMembers, workers, groups, texts, texts, st.integers(0, 2**16), st.integers(0, 2**53))
sources = st.builds(
    StateSource, workers, workers, st.integers(0, 2**62), workers, texts, st.integers(0, 2**16)
)
instructions = st.one_of(
    st.builds(host.StartView, workers, st.lists(members, max_size=3).map(tuple), texts, groups),
    st.builds(host.SendState, workers, sources),
    st.builds(host.KeepAlive, workers, st.floats(0, 1e9)),
    st.builds(host.PauseOutput, groups),
    st.builds(host.StartWorker, workers, st.booleans(), groups),
    st.builds(host.AskMembers, st.sampled_from(Notice)),
    st.builds(host.SendPosition, workers, sources),
    st.builds(host.SignalWorker, workers, st.integers(1, 64)),
    st.builds(host.DumpStack, workers),
    st.builds(StackRequest, workers),
    st.builds(host.AbortExchange, texts),
    st.builds(host.ReportAll),
    st.builds(host.EndHost, st.floats(0, 10), groups),
)
evidence = st.builds(
    host.WorkerEvidence, workers, st.booleans(), st.lists(texts).map(tuple), st.lists(texts).map(tuple)
)
seconds = st.floats(0, 1e9)
loads = st.builds(
    LoadMeasured,
    host=texts,
    cores=workers,
    busy=seconds,
    memory_used=st.integers(0, 2**53),
    memory_total=st.integers(0, 2**53),
    swapping=seconds,
    throttled=seconds,
    workers=st.lists(
        st.builds(WorkerLoad, worker=workers, cores=seconds, delayed=seconds, memory=workers, faults=seconds),
        max_size=3,
    ).map(tuple),
    gpus=st.lists(
        st.builds(
            GpuLoad,
            index=workers,
            name=texts,
            utilization=st.none() | workers,
            memory_used=st.none() | workers,
            memory_total=st.none() | workers,
            temperature=st.none() | workers,
            power=st.none() | seconds,
            processes=st.lists(st.tuples(workers, st.none() | workers)).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
)
reports = st.one_of(
    st.builds(
        EventReport,
        st.one_of(
            st.builds(WorkerStarted, workers, workers),
            st.builds(MessageMisunderstood, workers, texts),
            st.builds(WorkerConnectedLate, texts, texts, workers),
        ),
    ),
    st.builds(host.StartFailed, workers, st.booleans(), texts),
    st.builds(host.StartCancelled, workers, st.integers(1, 64)),
    st.builds(host.WorkerArrived, workers),
    st.builds(host.HostRetires, workers, texts),
    st.builds(host.HostStopped, workers, st.integers(1, 64)),
    st.builds(host.WorkerSaid, workers, relayed),
    st.builds(StateGiven, workers, st.booleans(), texts, source=st.none() | sources),
    st.builds(host.StateArrived, workers, workers, texts),
    st.builds(host.StateMoving, workers, workers, workers, workers, st.floats(0, 1e9)),
    st.builds(host.PositionMissed, workers, workers, texts),
    st.builds(
        host.ExitReport,
        st.builds(WorkerExited, workers, st.integers(-(2**16), 255)),
        st.integers(0, 3),
    ),
    st.builds(host.ViewRefused, workers, texts),
    st.builds(host.KeepAlive),
    st.builds(host.OutputWritten, workers, st.sampled_from([1, 2]), st.binary()),
    st.builds(host.LoadReport, loads),
    st.builds(StackReply, workers, st.lists(texts).map(tuple), texts),
    st.builds(host.AllReported),
    st.builds(host.HostEnded, groups, st.lists(evidence, max_size=3).map(tuple)),
)
UNIONS = {
    "worker": (WorkerMessage, relayed),
    "relayed": (RelayedMessage, relayed),
    "agent": (AgentMessage, st.one_of(st.builds(Leave), st.builds(AbortExchange, texts))),
    "instruction": (Instruction, instructions),
    "report": (HostReport, reports),
    "stop": (StopRequest, st.builds(StopRequest, st.integers(1, 64))),
}


@pytest.mark.parametrize("name", UNIONS)
@given(data=st.data())
def test_decoding_inverts_encoding(name: str, data: st.DataObject) -> None:
    union, messages = UNIONS[name]
    message = data.draw(messages)
    decoder: PacketDecoder[object] = PacketDecoder(union)
    assert decoder.decode(encode(message)) == message


@pytest.mark.parametrize("name", UNIONS)
@given(packet=st.binary())
def test_garbage_is_a_value_error(name: str, packet: bytes) -> None:
    decoder: PacketDecoder[object] = PacketDecoder(UNIONS[name][0])
    with pytest.raises(ValueError, match=r"."):
        decoder.decode(packet)


def decoded(message: FailureReport | EventReport) -> WorkerMessage:
    decoder: PacketDecoder[WorkerMessage] = PacketDecoder(WorkerMessage)
    return decoder.decode(encode(message))


def test_long_texts_lose_their_middle() -> None:
    text = "a" * MAX_TEXT + "ä" * MAX_TEXT
    sent = decoded(FailureReport(ScriptFailed(0, "s", text), 1, False))
    assert isinstance(sent, FailureReport)
    assert len(sent.event.traceback.encode()) <= MAX_TEXT
    assert sent.event.traceback.startswith("aaa")
    assert sent.event.traceback.endswith("äää")
    assert "\n... (cut) ...\n" in sent.event.traceback


def test_a_text_that_needs_escapes_fits_a_packet() -> None:
    assert len(encode(FailureReport(ScriptFailed(0, "", "\0" * 10 * MAX_TEXT), 1, False))) <= MAX_PACKET


def test_invalid_unicode_is_escaped() -> None:
    assert decoded(EventReport(CallStarted("\udc80"))) == EventReport(CallStarted("\\udc80"))


def test_a_message_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match=f"is more than {MAX_PACKET}"):
        encode(host.StartView(1, (HostMembers(0, tuple(range(200_000))),)))
