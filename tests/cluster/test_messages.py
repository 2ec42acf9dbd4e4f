"""Messages as lines: what goes in comes out, and anything else is refused with a reason."""

from __future__ import annotations

import json

import pytest

from replicax.cluster import _messages as messages
from replicax.cluster._messages import InvalidMessage, decode, encode

REPORT = messages.Report(7, "a step", None, 0.5, ("train.py:3 in main",))
EXAMPLES = [
    messages.Hello(1, ("10.0.0.1:1", "10.0.0.2:1"), messages.versions()),
    REPORT,
    messages.Put("all_gather/0", '{"value": NaN}'),
    messages.Withdraw("all_gather/0"),
    messages.AskState(),
    messages.Finished(3),
    messages.Failed("failed: \x1b[31mValueError\n", secondary=True),
    messages.TakeLeave(),
    messages.Preempted(),
    messages.Calls(0),
    messages.Welcome("10.0.0.1:999"),
    messages.Refused("no"),
    messages.TurnedAway("A process that came as worker 1 (10.0.0.1:1001) was refused: no."),
    messages.Beat(),
    messages.Value("all_gather/0", 1, "[1, 2]"),
    messages.Void("all_gather/0", 1),
    messages.Ended(1, "has finished its program", 3),
    messages.Ended(1, "failed", secondary=True),
    messages.Disconnected(1),
    messages.Left(1),
    messages.State(
        (messages.WorkerState(0.1, REPORT, None), messages.WorkerState(0.1, None, "failed")),
        {"all_gather/0": (1,)},
        (),
    ),
    messages.Deciding(),
    messages.Stop(4),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_what_is_encoded_is_decoded(message):
    line = encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode(line) == message


def test_every_kind_has_an_example():
    assert {type(message).__name__ for message in EXAMPLES} == messages._KINDS.keys()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "cut off"),
        (b'{"kind": "Beat"}', "cut off"),
        (b"GET / HTTP/1.1\r\n", "no JSON"),
        (b"\xff\xfe\n", "no JSON"),
        (b"[]\n", r"a JSON object; got \[\]"),
        (b"{}\n", "no message of kind None"),
        (b'{"kind": []}\n', r"no message of kind \[\]"),
        (b'{"kind": "Finish"}\n', "no message of kind 'Finish'"),
        (b'{"kind": "Finished"}\n', r"has the fields \['number'\]"),
        (b'{"kind": "Finished", "number": 1, "more": 1}\n', r"has the fields \['number'\]"),
        (b'{"kind": "Finished", "number": Infinity}\n', "Infinity is no number"),
        (b'{"kind": "Finished", "number": NaN}\n', "NaN is no number"),
        (b'{"kind": "Finished", "number": 1e999}\n', "number must be int; got inf"),
        (b'{"kind": "Finished", "number": 1.5}\n', "number must be int; got 1.5"),
        (b'{"kind": "Finished", "number": true}\n', "number must be int; got True"),
        (b'{"kind": "Finished", "number": 1%s}\n' % (b"0" * 5000), "4300 digits"),
        (b'{"kind": "Finished", "number": 1%s}\n' % (b"0" * 4000), "number must be int; got 1"),
        (b'{"kind": "Withdraw", "topic": %s}\n' % (b"[" * 100_000), "nested too deeply"),
        (b'{"kind": "Withdraw", "topic": 3}\n', "topic must be str; got 3"),
        (b'{"kind": "Failed", "reason": "", "secondary": 1}\n', "secondary must be bool; got 1"),
        (b'{"kind": "Hello", "index": 0, "addresses": "ab", "versions": {}}\n', "addresses must"),
        (b'{"kind": "Hello", "index": 0, "addresses": [1], "versions": {}}\n', "must be str"),
    ],
)
def test_what_is_no_message_is_refused_with_a_reason(line, reason):
    with pytest.raises(InvalidMessage, match=reason) as caught:
        decode(line)
    assert len(str(caught.value)) < 300


def test_a_message_that_is_too_large_is_not_encoded():
    with pytest.raises(InvalidMessage, match=r"kind Withdraw has 17,825,8\d\d bytes"):
        encode(messages.Withdraw("x" * 17 * 2**20))
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode(messages.Report(0, "", None, float("inf"), ()))
    assert json.loads(encode(messages.Calls(1))) == {"kind": "Calls", "calls": 1}
