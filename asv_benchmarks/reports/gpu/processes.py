"""Commands with a time limit."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress


def follow(call: list[str], seconds: float, tell: Callable[[str], None], **environment: str) -> int | None:
    """Run a command, pass each printed line to `tell`, and return the exit code.

    Return None if the command was killed after `seconds`, with all processes that it had started.
    """
    process = subprocess.Popen(
        call, env=os.environ | environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )

    def read() -> None:
        assert process.stdout
        with process.stdout as lines:
            for line in lines:
                tell(line.rstrip("\n"))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        reader.join(seconds)
    finally:  # also after Ctrl-C, which a process in its own session does not receive
        late = reader.is_alive()
        if late:
            # With a limit: a process that hangs in the driver does not die, and keeps its pipe open.
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(5.0)
                reader.join(5.0)  # its last line says where it was
    return None if late else process.wait()
