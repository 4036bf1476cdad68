"""What limpet-serve says of processes that have to be killed."""

import subprocess
import sys

# The engine's stand-in has a child of its own: killed with it, that one is found again as a zombie.
ENGINE = "import subprocess, time; subprocess.Popen(['sleep', '70']); print('up', flush=True); time.sleep(70)"
SERVER = (
    "import subprocess, sys, time;"
    f"subprocess.Popen([sys.executable, '-c', {ENGINE!r}, '-m', 'limpet.backend.engine_process']); time.sleep(70)"
)
SUPERVISOR = f"""
import os, sys
from limpet.backend.serve.process_tree import ProcessTree
tree = ProcessTree([sys.executable, "-c", {SERVER!r}], os.environ)
input()
print(sorted(name.partition(" (")[0] for name in tree.end(0.0)), file=sys.stderr)
"""


def test_each_killed_process_is_named_once_by_what_it_is() -> None:
    """In a process of its own: a tree ends all children of the process that it is in."""
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "up\n"
        _, killed = supervisor.communicate("\n", timeout=60)
    assert killed == "['The engine', 'The process sleep']\n"
