"""Settings that must hold before any test imports torch or matplotlib."""

import os

# One thread for each process: the tests compare bits, sums depend on how work is divided over threads, and a group of
# four processes on two cores is only slowed down by more. Set before torch is first imported; all children inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

# Never a window.
os.environ["MPLBACKEND"] = "Agg"

# The groups of the tests live on this machine; the name of the host may not even resolve.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
