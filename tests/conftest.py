"""For all tests: processes that they start can be interrupted, whoever started the tests."""

import signal

# A shell starts what runs in its background with SIGINT ignored, and children inherit that: Ctrl-C would do nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)
