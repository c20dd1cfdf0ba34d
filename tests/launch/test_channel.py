"""Messages arrive whole, in order, and the end of the other side is seen."""

from __future__ import annotations

import math
import os
import signal
import threading

import numpy as np
import pytest

from elaswave_fx.control.protocol.messages import Welcome
from elaswave_fx.control.wire import decode, encode
from elaswave_fx.errors import CommError
from elaswave_fx.launch import channel as channel_module
from elaswave_fx.launch.channel import Channel, ChannelClosed, Message
from elaswave_fx.launch.job import BuildResult, WorkerInputs
from elaswave_fx.launch.job_facts import JobFacts
from elaswave_fx.launch.location import here
from elaswave_fx.plan.work.topology import Rank


def test_messages_arrive_in_order_and_whole() -> None:
    left, right = Channel.pair()
    left.send("hello", port=4711)
    left.send("step", loss=float("nan"), text="später")
    assert right.receive(1.0) == Message("hello", {"port": 4711})
    message = right.receive(1.0)
    assert message is not None
    assert message.fields["loss"] != message.fields["loss"]
    assert message.fields["text"] == "später"
    assert right.drain() == []
    assert right.receive(0.0) is None


def test_a_user_s_numbers_and_names_arrive() -> None:
    left, right = Channel.pair()
    left.send("step", lr=np.float64(0.1), tile=(1, 2), signal=signal.SIGINT, name=np.str_("a"))
    assert right.receive(1.0) == Message("step", {"lr": 0.1, "tile": [1, 2], "signal": 2, "name": "a"})
    left.send("error", message="no file a\udc80", classes=["OSError"], more={"\udc81": ("\udc82", 1)})
    printed = {"message": r"no file a\udc80", "classes": ["OSError"], "more": {r"\udc81": [r"\udc82", 1]}}
    assert right.receive(1.0) == Message("error", printed)
    with pytest.raises(TypeError, match="ndarray is no type of a message"):
        left.send("step", lr=np.zeros(2))


def test_a_result_and_the_facts_of_a_job_keep_every_number() -> None:
    options = {"seed": 2**70, "limit": math.inf, "least": -(2**63) - 1}
    inputs = WorkerInputs(artifact="a", state="s", update=options, fingerprint={})
    built = BuildResult(plan="", units=2, samples=4, data=inputs, run={"config": {"model": {"options": options}}})
    assert BuildResult.read(built.text()) == built
    facts = JobFacts(build=built, host="h", place=here(), run_dir="r", store="s", folder="f")
    welcome = decode(encode(Welcome(Rank(4), facts.text(), ())))
    assert isinstance(welcome, Welcome) and JobFacts.read(welcome.facts) == facts
    with pytest.raises(CommError, match="the facts of a job cannot be read"):
        JobFacts.read("{}")


def test_a_message_larger_than_the_socket_arrives() -> None:
    left, right = Channel.pair()
    text = "x" * (3 << 20)
    sender = threading.Thread(target=left.send, args=("big",), kwargs={"text": text})
    sender.start()
    assert right.receive(30.0) == Message("big", {"text": text})
    sender.join()


def test_bytes_that_come_one_by_one_make_one_message() -> None:
    left, right = Channel.pair()
    left.send("step", n=1)
    whole = os.read(right.fileno(), 1 << 16)
    for byte in whole[:-1]:
        os.write(left.fileno(), bytes([byte]))
        assert right.drain() == []
    os.write(left.fileno(), whole[-1:])
    assert right.drain() == [Message("step", {"n": 1})]


def test_what_was_sent_before_the_end_is_still_read() -> None:
    left, right = Channel.pair()
    left.send("done", summary={})
    left.close()
    assert right.receive(1.0) == Message("done", {"summary": {}})
    with pytest.raises(ChannelClosed, match="the other end is gone"):
        right.receive(1.0)
    with pytest.raises(ChannelClosed, match="hello was not sent"):
        right.send("hello")


def test_a_message_that_is_too_long_is_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = Channel.pair()
    monkeypatch.setattr(channel_module, "MESSAGE_BYTES_MAX", 100)
    with pytest.raises(CommError, match="message big has 2.. bytes; at most 100"):
        left.send("big", text="x" * 200)
    os.write(left.fileno(), (101).to_bytes(4, "big"))
    with pytest.raises(CommError, match="a message of 101 bytes; at most 100"):
        right.drain()
