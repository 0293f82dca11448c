"""What holds for all tests."""

from hypothesis import settings

# Nothing here asserts on time: a busy machine must not fail a property. The rest is Hypothesis' own profile, which
# is another one on CI.
settings.register_profile("limes", settings(), deadline=None)
settings.load_profile("limes")
