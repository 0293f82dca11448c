"""What holds for all tests."""

import os

from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:  # a process a core: more threads than cores wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Nothing here asserts on time: a busy machine must not fail a property. The rest is Hypothesis' own profile, which
# is another one on CI.
settings.register_profile("limes", settings(), deadline=None)
settings.load_profile("limes")
