"""A cluster on hosts that are network namespaces, as `kvrelay up` brings it up."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.chaos.network import Hosts

FILE = """
[ssh]
command = ["ip", "netns", "exec", "{{host}}", "env", "RAY_TMPDIR={folder}/{{host}}"]
python = "{python}"
folder = "{folder}/kept/{{host}}"

[serve]
config = "kvrelay.toml"
args = ["--host", "0.0.0.0", "--insecure", "--port", "8000"]
"""
ENTRY = '[[host]]\nname = "{name}"\naddress = "{address}"\nray_args = ["--num-cpus=1"]\n'


def write_hosts_file(folder: Path, hosts: Hosts, settings: str) -> Path:
    """In `folder`, which begins anew and has a short name, for Ray's sockets. `settings`: what
    kvrelay.toml says."""
    shutil.rmtree(folder, ignore_errors=True)
    text = FILE.format(folder=folder, python=sys.executable)
    for number, name in enumerate(hosts.names):
        (folder / name).mkdir(parents=True)
        text += ENTRY.format(name=name, address=hosts.address(number))
    path = folder / "HOSTS.toml"
    path.write_text(text)
    (folder / "kvrelay.toml").write_text(settings)
    return path


def kvrelay(*args: object) -> str:
    """Runs a command, and returns what it says."""
    command = [str(Path(sys.executable).parent / "kvrelay"), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
