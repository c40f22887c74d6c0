"""Commands that must not take more time than they have."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress


def follow(call: list[str], seconds: float, tell: Callable[[str], None], **environment: str) -> int | None:
    """Run a command and tell each line that it prints; return its exit code.

    None if it had to be killed, with all processes that it has started.
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
    finally:  # also of an interrupt from the keyboard, which a session of its own does not see
        late = reader.is_alive()
        if late:
            # Not waited for for ever: what hangs in the driver does not die, and keeps its pipe.
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(5.0)
                reader.join(5.0)  # the line that it was about to write says where it was
    return None if late else process.wait()
