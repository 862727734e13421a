"""What every test shares: how hard hypothesis tries, and that XLA runs on the CPU unless told otherwise."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "short",
    max_examples=100,
    deadline=None,  # a busy machine is not a failure
    derandomize=True,  # what passed once passes again; new examples are for the long profile
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("long", parent=settings.get_profile("short"), max_examples=5000, derandomize=False)
settings.load_profile("short")  # by hand: --hypothesis-profile=long

os.environ.setdefault("PJRT_DEVICE", "CPU")  # read when torch_xla is first imported, here or in a process of a test
