"""Whether the Hugging Face hub answers, found out in seconds whatever the network does."""

from __future__ import annotations

import os
import sys
import threading
import urllib.error
import urllib.request
from functools import cache

DEADLINE = 6.0


@cache
def offline() -> str:
    """Return why the hub cannot be used, or an empty string if it answers.

    A silent name server ignores every timeout, so the question is asked in a daemon thread that is left
    behind at the deadline. The answer is remembered, and after a negative one libraries and worker processes
    use their local caches without asking again.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return "HF_HUB_OFFLINE is set"
    reasons: list[str] = []
    probe = threading.Thread(target=lambda: reasons.append(_ask()), daemon=True)
    probe.start()
    probe.join(DEADLINE)
    reason = reasons[0] if reasons else f"the hub did not answer within {DEADLINE:.0f} s"
    if reason:
        os.environ["HF_HUB_OFFLINE"] = "1"
        for name in ("huggingface_hub.constants", "datasets.config"):
            if name in sys.modules:  # imported before, and with it the variable read for good
                vars(sys.modules[name])["HF_HUB_OFFLINE"] = True
    return reason


def _ask() -> str:
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        with urllib.request.urlopen(f"{endpoint}/api/datasets/fancyzhx/ag_news", timeout=DEADLINE - 1):
            return ""
    except urllib.error.HTTPError as error:  # it is there; whether it has the data is another question
        return f"the hub answers with error {error.code}" if error.code >= 500 else ""
    except Exception as error:
        return f"the hub cannot be reached ({getattr(error, 'reason', error)})"
