"""Settings that must hold before any test imports torch or matplotlib, and those of hypothesis."""

import os

from hypothesis import HealthCheck, settings

# One thread for each process: the tests compare bits, sums depend on how work is divided over threads, and a group of
# four processes on two cores is only slowed down by more. Set before torch is first imported; all children inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

# Never a window.
os.environ["MPLBACKEND"] = "Agg"

# The groups of the tests live on this machine; the name of the host may not even resolve.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

# No test asserts a time, and hypothesis would: an example that is slow only because the machine is busy is no fault.
settings.register_profile("hocket", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("hocket")
