"""The process that compiles grammars for one API.

`python -m kvrelay.cluster.api.constraints.compiler FD MODEL_DIR EOS...`

It reads the vocabulary once and forks for each grammar, so what a grammar takes ends with the fork:
the kernel ends one that takes more than CPU_S of a core or MEMORY_BYTES, and all others go on. A
call is a socket that comes over FD; it ends when FD is closed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import llguidance

# Which what is called needs: forks do not import it again.
import kvrelay.cluster.api.constraints.calls
import kvrelay.cluster.api.output.dialect  # noqa: F401
from kvrelay.cluster.api.constraints.grammar import BEGUN, CPU_S, MEMORY_BYTES, REAL_S
from kvrelay.cluster.api.constraints.schema import SchemaError, in_one_line
from kvrelay.engine.model.sampling.grammar import compile_grammar
from kvrelay.engine.model.sampling.vocabulary import GrammarError, read_vocabulary

NICE = 5  # streams go first
CALL_BYTES = 64 * 1024  # that are read at once
# Tokens that are tried: what a grammar cannot do is seen at its first masks, or in a worker.
NUM_TRIED = 8
NOTHING = "no text matches it"
_OPENING = ("{", "[", '"')


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the API ends this one
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    os.nice(NICE)
    vocabulary: llguidance.LLTokenizer | str
    try:
        vocabulary = read_vocabulary(Path(sys.argv[2]), [int(each) for each in sys.argv[3:]])
    except GrammarError as error:
        vocabulary = str(error)
    gc.freeze()
    while True:
        _, received, _, _ = socket.recv_fds(control, 1, 1)
        if not received:
            return
        with socket.socket(fileno=received[0]) as call:
            if os.fork() == 0:
                _answer(call, vocabulary)


def _answer(call: socket.socket, vocabulary: llguidance.LLTokenizer | str) -> None:
    """In a fork, which ends here. What is missing after BEGUN says that it took too much."""
    try:
        call.sendall(BEGUN)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # dying words of libraries
        _limit()
        parts = []
        while part := call.recv(CALL_BYTES):
            parts.append(part)
        call.sendall(json.dumps(_outcome(vocabulary, pickle.loads(b"".join(parts)))).encode())
    finally:
        os._exit(0)


def _limit() -> None:
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    signal.setitimer(signal.ITIMER_REAL, REAL_S)
    pages = int(Path("/proc/self/statm").read_text().split()[5])  # of data
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _outcome(vocabulary: llguidance.LLTokenizer | str, make: Callable[[], str]) -> tuple[str, str]:
    """What it is, and the grammar or why there is none."""
    if isinstance(vocabulary, str):
        return "unusable", vocabulary
    try:
        grammar = make()
        wrong = what_is_wrong(vocabulary, grammar)
    except (SchemaError, NotImplementedError) as error:
        return "wrong", str(error)
    return ("grammar", grammar) if wrong is None else ("wrong", wrong)


def what_is_wrong(vocabulary: llguidance.LLTokenizer, grammar: str) -> str | None:
    try:
        matcher = compile_grammar(vocabulary, grammar)
        matcher.compute_bitmask()  # a grammar that nothing matches is found here
    except GrammarError as error:
        wrong = str(error)
        if wrong.endswith(":"):  # more is said on other lines
            wrong = llguidance.LLMatcher.validate_grammar(grammar) or wrong
        return in_one_line(wrong)
    if matcher.stop_reason() not in ("NotStopped", "NoExtension"):
        return _said(matcher) or NOTHING
    _try(matcher, vocabulary)
    return _said(matcher)


def _said(matcher: llguidance.LLMatcher) -> str | None:
    error = matcher.get_error() if matcher.is_error() else None
    if error is None:
        return None
    return NOTHING if error.startswith("NoExtension") else in_one_line(error)


def _try(matcher: llguidance.LLMatcher, vocabulary: llguidance.LLTokenizer) -> None:
    """Begin an output, to see whether a worker could."""
    opening = [vocabulary.tokenize_str(text) for text in _OPENING]
    for _ in range(NUM_TRIED):
        if matcher.is_error() or matcher.is_stopped():
            return
        tokens = matcher.compute_ff_tokens()
        if not tokens:
            tokens = next((t for t in opening if matcher.validate_tokens(t) == len(t)), [])
        if not tokens or matcher.is_error():
            return
        matcher.consume_tokens(tokens)
        if not matcher.is_stopped():
            matcher.compute_bitmask()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
