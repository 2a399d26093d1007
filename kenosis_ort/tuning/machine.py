"""Which machine it is, as far as timings depend on it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import asdict, dataclass

import onnxruntime as ort

from kenosis_ort.targets import DEFAULT_TARGET, get_target
from kenosis_ort.targets.machine import processor


@dataclass(frozen=True)
class Machine:
    """What a timing depends on besides the model.

    Attributes:
        cpu: The processor's name as the operating system tells it.
        architecture: Its family, e.g. ``x86_64``.
        flags: Instruction sets that matter to matrix kernels; empty where the system does not list them.
        saturates: Whether 8-bit products saturate.
        cores: Logical processors.
        runtime: Version of onnxruntime.
        threads: Threads of a session, 0 for the runtime's own choice.
    """

    cpu: str
    architecture: str
    flags: tuple[str, ...]
    saturates: bool
    cores: int
    runtime: str
    threads: int

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all attributes, 64 hexadecimal digits."""
        plain = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(plain.encode()).hexdigest()

    def __str__(self) -> str:
        threads = {0: "all threads", 1: "one thread"}.get(self.threads, f"{self.threads} threads")
        flags = f" ({', '.join(self.flags)})" if self.flags else ""
        return f"{self.cpu}{flags}, {self.cores} cores, onnxruntime {self.runtime}, {threads}"


def this_machine(threads: int) -> Machine:
    """Describes the machine this runs on.

    Args:
        threads: Threads of the sessions that are timed.
    """
    cpu, flags = processor()
    saturates = get_target(DEFAULT_TARGET).data_types().saturates
    return Machine(cpu, platform.machine(), flags, saturates, os.cpu_count() or 1, ort.__version__, threads)


def machine_fingerprint(threads: int) -> str:
    """Returns 64 hexadecimal digits that stay the same while timings on this machine mean the same."""
    return this_machine(threads).fingerprint
