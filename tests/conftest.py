"""Settings common to all tests."""

from hypothesis import settings

# The first example compiles; a deadline would measure XLA.
settings.register_profile("jspec", deadline=None)
settings.load_profile("jspec")
