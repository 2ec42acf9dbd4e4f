"""The launcher, with real processes; the scripts import nothing slow."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import queue
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click.testing
import pytest

from replicax._command_line import main
from replicax.errors import InvalidArgument
from replicax.launch import Patience, launch
from replicax.launch._escapes import harmless
from replicax.launch._exits import Exits
from replicax.launch._output import _Lines
from replicax.launch._status import Status

# Long enough for anything on a busy machine, in seconds.
LONG = 60.0
QUICK = Patience(grace=LONG, notice=0.2, terminate=0.2)
PRELUDE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
told = json.loads(os.environ["TF_CONFIG"])
me, directory = told["task"]["index"], Path(__file__).parent

def tell(name, text=""):  # whole, or not there at all
    file = directory / f".{name}.{me}"
    file.write_text(str(text))
    file.rename(directory / name)

def wait_for(name):
    while not (directory / name).exists():
        time.sleep(0.002)
"""


@dataclass(frozen=True)
class Run:
    code: int
    out: str
    err: str

    def lines(self, worker: int) -> list[str]:
        prefix = f"[worker {worker}] "
        lines = self.out.splitlines()
        return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(body: str) -> str:
        file = tmp_path / "script.py"
        file.write_text(PRELUDE + textwrap.dedent(body))
        return str(file)

    return write


@pytest.fixture
def run(script, capfd) -> Callable[..., Run]:
    """Runs a script as workers, launched by this process."""

    def run(body: str, workers: int = 2, patience: Patience = QUICK, **options) -> Run:
        code = launch([script(body)], workers=workers, patience=patience, **options)
        return Run(code, *capfd.readouterr())

    return run


@contextlib.contextmanager
def launcher(*arguments: str, **options) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher in a process of its own, for what is done to such a process."""
    process = subprocess.Popen([sys.executable, "-m", "replicax.launch", *arguments], **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait(LONG)


def read(file: Path) -> str:
    """Wait for the report of a worker, and return it."""
    wait_until(file.exists)
    return file.read_text()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def wait_until_gone(*processes: str) -> None:
    """A signal reaches a process that is not our child in its own time."""
    wait_until(lambda: all(map(is_gone, processes)))


def is_gone(process: str) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"  # dead; whoever adopted it may take a while to notice


linux_only = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")


# Output.


def test_nothing_that_workers_write_is_lost(run):
    body = """
        for number in range(10_000):
            print("line", number, file=sys.stderr if number % 100 == 0 else sys.stdout)
        print("the end", end="")
    """
    result = run(body, workers=3)
    assert result.code == 0
    assert result.err == ""
    for worker in range(3):
        expected = [f"line {number}" for number in range(10_000)]
        assert result.lines(worker) == [*expected, "the end"]
    assert len(result.out.splitlines()) == 3 * 10_001


def test_bytes_that_are_no_text_and_progress_bars(run, tmp_path):
    body = r"""
        write = sys.stdout.buffer.write
        write(b"\xff\xfe\n")
        for percent in range(0, 101, 20):
            write(b"\r%d %%" % percent)
            sys.stdout.flush()
            time.sleep(0.01)
        write(b"\nwindows\r\n")
    """
    result = run(body, workers=1, log_directory=tmp_path / "logs")
    assert result.lines(0)[1:] == ["100 %", "windows"]
    log = (tmp_path / "logs" / "attempt-0" / "worker-0.log").read_bytes()
    assert log.startswith(b"\xff\xfe\n\r0 %\r20 %")


ESCAPES = {
    b"plain \xc3\xa9\xe2\x9b\xb5\ttab": b"plain \xc3\xa9\xe2\x9b\xb5\ttab",
    b"\xff\xfe": b"\xff\xfe",
    b"\x1b[1;31mred\x1b[0m": b"\x1b[1;31mred\x1b[0m\x1b[0m",
    b"\x1b[38;2;1;2;3mleft on": b"\x1b[38;2;1;2;3mleft on\x1b[0m",
    b"clear\x1b[2J\x1b[H\x1b[K\x1b[?25l": b"clear",
    b"\x1b]0;title\x07text": b"text",
    b"\x1b]52;c;Y29weQ==\x1b\\text": b"text",
    b"\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\": b"link",
    b"\x1bPq#0\x1b\\sixel": b"sixel",
    b"\x1bcreset\x1b7\x1b(0": b"reset",
    b"\x1b]0;not ended": b"\\x1b]0;not ended",
    b"\x1b[": b"\\x1b[",
    b"\x1b": b"\\x1b",
    b"\x1b\x1b[2J[2J": b"\\x1b[2J",
    b"bell\x07 back\x08 delete\x7f null\x00": b"bell\\x07 back\\x08 delete\\x7f null\\x00",
    b"\xc2\x9b2J": b"\\x9b2J",
    b"\x9b2J": b"\\x9b2J",
}


@pytest.mark.parametrize(("line", "shown"), ESCAPES.items(), ids=range(len(ESCAPES)))
def test_colours_pass_and_other_escapes_do_not(line, shown):
    assert harmless(line) == shown
    assert harmless(shown.removesuffix(b"\x1b[0m"), colours=False).find(b"\x1b") == -1


@pytest.mark.parametrize("part", [b"\x1b]", b"\x1b[", b"\x1bP0", b"\x1b", b"\xc2\x90", b"\x1b[0;"])
def test_a_long_line_of_escapes_takes_no_time(part):
    began = time.monotonic()
    assert b"\x1b" not in harmless(part * 200_000)
    assert time.monotonic() - began < 10


def test_what_a_worker_writes_cannot_change_the_terminal(run, tmp_path):
    body = r"""
        write = sys.stdout.buffer.write
        write(b"\x1b]0;evil\x07\x1b[31mred\x1b[2J\n")
        write(b"\x1b]0;over two\nlines\x07\n")
        sys.exit(3)
    """
    result = run(body, workers=1, log_directory=tmp_path / "logs")
    lines = ["\x1b[31mred\x1b[0m", "\\x1b]0;over two", "lines\\x07"]
    assert result.lines(0) == lines
    assert "\n".join(f"    {line}" for line in lines) in result.err
    log = (tmp_path / "logs" / "attempt-0" / "worker-0.log").read_bytes()
    assert log.startswith(b"\x1b]0;evil\x07\x1b[31mred\x1b[2J\n")


def test_a_progress_bar_in_the_status_has_no_escapes():
    lines = _Lines()
    assert lines.add(b"\r\x1b[32m10 %\x1b[0m\x1b[K") == []
    assert lines.progress == b"10 %"
    assert lines.add(b"\r\x1b[32m20 %\x1b") == []  # the middle of a sequence
    assert lines.add(b"[0m\n") == [b"\x1b[32m20 %\x1b[0m\x1b[0m"]


def as_link(path: Path, elsewhere: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(elsewhere)


def as_fifo(path: Path, elsewhere: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("place", "make"),
    [
        ("attempt-0/worker-0.log", as_link),
        ("attempt-0/worker-1.log", as_link),
        ("attempt-0/worker-1.log", as_fifo),
        ("attempt-0", as_link),
    ],
)
def test_logs_are_not_written_elsewhere(script, tmp_path, place, make):
    precious = tmp_path / "precious"
    if place == "attempt-0":
        precious.mkdir()
    else:
        precious.write_text("kept")
    make(tmp_path / "logs" / place, precious)
    result = click.testing.CliRunner().invoke(
        main, ["launch", "--workers", "2", "--log-dir", str(tmp_path / "logs"), script("pass")]
    )
    assert result.exit_code == 2
    assert "The output of workers cannot be written to" in result.output
    assert list(precious.iterdir()) == [] if precious.is_dir() else precious.read_text() == "kept"


def test_the_log_directory_itself_may_be_a_link(run, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "logs").symlink_to(tmp_path / "disk")
    assert run("print(me)", log_directory=tmp_path / "logs").code == 0
    assert (tmp_path / "disk" / "attempt-0" / "worker-1.log").read_text() == "1\n"


def test_a_script_that_is_a_fifo_is_refused(tmp_path):
    os.mkfifo(tmp_path / "script.py")
    arguments = ["launch", "--workers", "1", str(tmp_path / "script.py")]
    result = click.testing.CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "there is no file" in result.output


def test_the_log_directory_has_a_file_for_each_worker_of_each_attempt(run, tmp_path):
    body = """
        print("this is", me, file=sys.stderr)
        print("port", told["cluster"]["worker"][me])
        sys.exit(5 * me)
    """
    logs = tmp_path / "new" / "logs"
    result = run(body, max_restarts=1, backoff=0.0, log_directory=logs)
    assert result.code == 5
    texts = {str(file.relative_to(logs)): file.read_text() for file in logs.glob("*/*")}
    assert sorted(texts) == [f"attempt-{i}/worker-{j}.log" for i in range(2) for j in range(2)]
    assert texts["attempt-1/worker-1.log"].startswith("this is 1\nport 127.0.0.1:")
    assert f"All output is in {logs / 'attempt-1'}." in result.err


def test_a_run_does_not_end_with_its_pager(script, tmp_path):
    body = """
        for _ in range(10_000):
            print("x" * 100)
        tell(f"done {me}")
    """
    with launcher("--workers", "2", script(body), stdout=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.wait(LONG) == 0
    assert (tmp_path / "done 0").exists()
    assert (tmp_path / "done 1").exists()


def test_the_status_line_of_a_terminal_leaves_lines_alone(script):
    body = """
        for number in range(300):
            print("line", number, end=" .\\n")
            if number % 50 == 0:
                time.sleep(0.1)
    """
    master, slave = pty.openpty()
    seen = bytearray()
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm"}
    with launcher(
        *("--workers", "2", "--max-restarts", "1", script(body)),
        stdout=slave,
        stderr=slave,
        env=environment,
    ) as process:
        os.close(slave)
        with contextlib.suppress(OSError):  # the other end is closed
            while chunk := os.read(master, 1 << 16):
                seen += chunk
        os.close(master)
        assert process.wait(LONG) == 0
    text = seen.decode()
    assert "\x1b[36m[worker 0] \x1b[0m" in text
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert re.search(r"2 of 2 workers running · 0:\d\d · attempt 0 · restarts left: 1\r", plain)
    for worker in range(2):
        shown = [line for line in re.split(r"[\r\n]+", plain) if f"[worker {worker}]" in line]
        assert shown == [f"[worker {worker}] line {number} ." for number in range(300)]


# Environment and arguments.


def test_workers_are_told_of_each_other_and_nothing_else(run):
    result = run("print(json.dumps(dict(os.environ)))", workers=3)
    told = [json.loads(result.lines(worker)[0]) for worker in range(3)]
    configurations = [json.loads(environment.pop("TF_CONFIG")) for environment in told]
    for environment in told:
        assert environment == {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    addresses = configurations[0]["cluster"]["worker"]
    assert len(set(addresses)) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses)
    for index, configuration in enumerate(configurations):
        assert configuration == {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": index},
        }


def test_logical_devices(run):
    result = run("print(os.environ['JAX_NUM_CPU_DEVICES'])", devices_per_worker=3)
    assert result.lines(0) == result.lines(1) == ["3"]


def test_what_follows_the_script_is_passed_on_untouched(script):
    file = script("print(json.dumps(sys.argv[1:]))")
    given = ["--workers", "7", "--", "-m", "--log-dir=x", "", "a b", "*", "--help"]
    command = [sys.executable, "-m", "replicax", "launch", "--workers", "1", file, *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=True)
    assert json.loads(done.stdout.removeprefix("[worker 0] ")) == given


def test_a_module_instead_of_a_script(script, tmp_path):
    script("print(__name__, sys.argv[1:])")
    with launcher(
        *("--workers", "1", "-m", "script", "-m", "x"), stdout=subprocess.PIPE, cwd=tmp_path
    ) as process:
        out, _ = process.communicate(timeout=LONG)
    assert out == b"[worker 0] __main__ ['-m', 'x']\n"
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([__file__], "Missing option '--workers'"),
        (["--workers", "2"], "Missing argument 'SCRIPT'"),
        (["--workers", "0", __file__], "0 is not in the range x>=1"),
        (["--workers", "two", __file__], "'two' is not a valid integer"),
        (["--workers", "2", "--max-restarts", "-1", __file__], "-1 is not in the range x>=0"),
        (["--workers", "2", "--devices-per-worker", "0", __file__], "0 is not in the range"),
        (["--workers", "2", "--worker", __file__], "No such option"),
        (["--workers", "2", "missing.py"], "there is no file 'missing.py'"),
        (["--workers", "2", "--grace-period", "nan", __file__], "got nan."),
        (["--workers", "2", "--grace-period", "1e300", __file__], "got 1e+300."),
        (["--workers", "2", "--backoff", "-1", __file__], "it must be a number of seconds"),
        (["--workers", "2", "--backoff", "soon", __file__], "'soon' is not a valid"),
        (["--workers", "2", "--log-dir", __file__, __file__], "is a file"),
        (["--workers", "2", "--log-dir", f"{__file__}/logs", __file__], "Not a directory"),
    ],
)
def test_bad_options(arguments, complaint):
    result = click.testing.CliRunner().invoke(main, ["launch", *arguments])
    assert result.exit_code == 2
    assert complaint in result.output


def test_bad_arguments_of_the_function():
    with pytest.raises(InvalidArgument, match="1 or more workers; got 0"):
        launch(["x.py"], workers=0)
    with pytest.raises(InvalidArgument, match="1 or more devices; got 0"):
        launch(["x.py"], workers=1, devices_per_worker=0)


def test_version():
    result = click.testing.CliRunner().invoke(main, ["--version"])
    assert result.output.startswith("replicax, version ")


# Failures.


@pytest.mark.parametrize(
    ("end", "code", "how"),
    [
        ("raise ValueError('so bad')", 1, "exit code 1"),
        ("sys.exit(3)", 3, "exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
    ],
)
def test_the_exit_code_is_that_of_the_failure(run, end, code, how):
    body = f"""
        for number in range(100):
            print("line", number)
        if me == 1:
            {end}
    """
    result = run(body, patience=Patience())
    assert result.code == code
    assert f"[launcher] Worker 1 failed first: {how} after " in result.err
    assert "[launcher] Worker 0: exit code 0 (" in result.err
    shown = [line[4:] for line in result.err.splitlines() if line.startswith("    ")]
    assert shown == result.lines(1)[-20:]


def test_a_worker_that_is_done_early_is_no_failure(run):
    body = """
        if me == 0:
            tell("done")
        else:
            wait_for("done")
            time.sleep(0.5)
            print("done too")
    """
    result = run(body)
    assert result.code == 0
    assert result.lines(1) == ["done too"]


@pytest.mark.parametrize("in_order", [True, False], ids=["descriptors", "threads"])
def test_the_first_failure_is_named_not_those_that_follow(run, in_order, monkeypatch):
    if not in_order:
        monkeypatch.setattr("replicax.launch._exits._descriptors", lambda processes: None)
    body = """
        pipe = directory / "pipe"
        if me == 0:
            os.mkfifo(directory / ".pipe")
            (directory / ".pipe").rename(pipe)
        wait_for("pipe")
        if me == 2:
            writing = open(pipe, "w")
            time.sleep(0.2)
            os._exit(3)
        open(pipe).read()  # until the other is gone
        print("lost worker 2")
        time.sleep(0.02)
        sys.exit(4)
    """
    result = run(body, workers=3, patience=Patience())
    assert result.code == 3
    assert "Worker 2 failed first: exit code 3" in result.err
    assert "It wrote nothing." in result.err
    assert "Worker 0: exit code 4" in result.err  # by itself
    assert result.lines(1) == ["lost worker 2"]


def test_processes_are_seen_to_end_in_their_order():
    events = queue.SimpleQueue()
    processes = [subprocess.Popen(["sleep", str(seconds)]) for seconds in (0.4, 0.0, 0.2)]
    Exits(processes, events).join()
    assert [events.get_nowait().worker for _ in range(3)] == [1, 2, 0]


@linux_only
def test_the_others_are_stopped_whatever_they_do(run, tmp_path):
    body = """
        if me == 0:
            for name in ("deaf", "stopped", "parent", "polite"):
                wait_for(name)
            sys.exit(9)
        if me == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            tell("deaf", os.getpid())
        if me == 2:
            tell("stopped", os.getpid())
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.kill(os.getpid(), signal.SIGSTOP)
            while True:  # the launcher lets it go on
                os.kill(os.getpid(), signal.SIGSTOP)
        if me == 3:
            child = subprocess.Popen(["sleep", "1000"])
            tell("child", child.pid)
            tell("parent", os.getpid())
        if me == 4:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            tell("polite")
        time.sleep(1000)
    """
    result = run(body, workers=5, patience=Patience(notice=0.2, terminate=1.0))
    assert result.code == 9
    assert "Worker 0 failed. The others have 0.2 s" in result.err
    assert "Worker 1: killed, as it did not end" in result.err
    assert "Worker 2: killed, as it did not end" in result.err
    assert "Worker 3: stopped with SIGTERM" in result.err
    assert "Worker 4: exit code 0" in result.err
    for name in ("deaf", "stopped", "parent", "child"):
        wait_until_gone(read(tmp_path / name))


@linux_only
def test_workers_that_are_done_leave_no_processes(run, tmp_path):
    body = """
        child = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL if me else None)
        tell(f"child {me}", child.pid)
    """
    assert run(body).code == 0
    wait_until_gone(read(tmp_path / "child 0"), read(tmp_path / "child 1"))


def test_processes_that_got_away_do_not_hold_up_the_end(run, tmp_path):
    body = """
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print("child", child.pid)
    """
    result = run(body, workers=1)
    os.kill(int(result.lines(0)[0].removeprefix("child ")), signal.SIGKILL)
    assert result.code == 0


def test_launching_elsewhere_than_in_the_main_thread(run):
    codes = []
    thread = threading.Thread(target=lambda: codes.append(run("sys.exit(4)", workers=1).code))
    thread.start()
    thread.join(LONG)
    assert codes == [4]


def test_signal_handlers_are_put_back(run):
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    run("pass")
    assert before == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


# Restarts.

FAILS_TWICE = """
    attempts = directory / f"attempts {me}"
    with attempts.open("a") as file:
        file.write(told["cluster"]["worker"][me] + "\\n")
    attempt = len(attempts.read_text().splitlines())
    if me == 1 and attempt < 3:
        wait_for("attempts 0")
        while len((directory / "attempts 0").read_text().splitlines()) < attempt:
            time.sleep(0.002)
        sys.exit(attempt)
    if attempt < 3:
        time.sleep(1000)
"""


def test_all_workers_are_started_again_until_it_works(run, tmp_path):
    began = time.monotonic()
    result = run(FAILS_TWICE, max_restarts=5, backoff=0.2)
    assert result.code == 0
    assert time.monotonic() - began > 0.2 + 0.4
    assert "[launcher, attempt 0] Worker 1 failed first: exit code 1" in result.err
    assert "[launcher, attempt 0] Starting all workers again in 0.2 s." in result.err
    assert "[launcher, attempt 1] Worker 1 failed first: exit code 2" in result.err
    assert "[launcher, attempt 1] Starting all workers again in 0.4 s." in result.err
    assert "attempt 2" not in result.err
    for worker in range(2):
        ports = (tmp_path / f"attempts {worker}").read_text().splitlines()
        assert len(set(ports)) == 3


def test_thousands_of_restarts_have_a_pause(monkeypatch, script):
    class Late(Status):
        def __init__(self, workers: int, max_restarts: int) -> None:
            super().__init__(workers, max_restarts)
            self.attempt = 5000

    monkeypatch.setattr("replicax.launch._launcher.Status", Late)
    assert launch([script("sys.exit(3)")], workers=1, max_restarts=5001, backoff=0.0) == 3


def test_restarts_come_to_an_end(run):
    result = run(FAILS_TWICE, max_restarts=1, backoff=0.0)
    assert result.code == 2
    assert result.err.count("failed first") == 2
    assert result.err.count("Starting all workers again") == 1


# Signals to the launcher.


@pytest.mark.parametrize(
    ("number", "reaction", "code"),
    [
        (signal.SIGINT, "pass", 130),
        (signal.SIGTERM, "pass", 143),
        (signal.SIGTERM, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))", 0),
        (signal.SIGTERM, "signal.signal(signal.SIGTERM, signal.SIG_IGN)", 143),
    ],
    ids=["Ctrl-C", "SIGTERM", "saves a checkpoint", "deaf"],
)
def test_signals_are_passed_on(script, tmp_path, number, reaction, code):
    body = f"""
        {reaction}
        tell(f"ready {{me}}", os.getpid())
        time.sleep(1000)
    """
    grace = "0.3" if "SIG_IGN" in reaction else str(LONG)
    with launcher(
        *("--workers", "2", "--grace-period", grace, "--max-restarts", "3", script(body)),
        stderr=subprocess.PIPE,
    ) as process:
        workers = [read(tmp_path / f"ready {worker}") for worker in range(2)]
        process.send_signal(number)
        _, err = process.communicate(timeout=LONG)
    assert process.returncode == code
    assert all(map(is_gone, workers))
    assert f"Got {number.name}, and sent it to the workers.".encode() in err
    assert b"again in" not in err
    assert b"failed first" not in err


def test_a_grace_period_without_limit(script, tmp_path):
    body = """
        def save(*_):
            time.sleep(0.5)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        tell(f"ready {me}")
        time.sleep(1000)
    """
    with launcher(
        *("--workers", "1", "--grace-period", "inf", script(body)), stderr=subprocess.PIPE
    ) as process:
        read(tmp_path / "ready 0")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=LONG)
    assert process.returncode == 0, err
    assert b"They may take any time; press Ctrl-C to kill them now." in err


def test_a_second_ctrl_c_kills_at_once(script, tmp_path):
    body = """
        def hear(*_):
            print("heard")
        signal.signal(signal.SIGINT, hear)
        tell(f"ready {me}")
        while True:
            time.sleep(1000)
    """
    with launcher("--workers", "1", script(body), stdout=subprocess.PIPE) as process:
        read(tmp_path / "ready 0")
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"[worker 0] heard\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LONG / 3)  # less than the grace period
    assert process.returncode == 130


@pytest.mark.parametrize("backoff", ["1000", "inf"])
def test_ctrl_c_between_two_attempts(script, backoff):
    with launcher(
        *("--workers", "1", "--max-restarts", "3", "--backoff", backoff, script("sys.exit(3)")),
        stderr=subprocess.PIPE,
    ) as process:
        while b"Starting all workers again in 30 s" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LONG / 3)
    assert process.returncode == 130


@linux_only
def test_a_launcher_that_is_killed_leaves_no_orphan(script, tmp_path):
    body = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "1000"])
        tell(f"ready {me}", f"{os.getpid()} {child.pid} {os.getpgid(0)}")
        if me == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)
    """
    with launcher("--workers", "2", script(body)) as process:
        left = [each for i in range(2) for each in read(tmp_path / f"ready {i}").split()]
        process.kill()
        process.wait(LONG)
    wait_until_gone(*left)
