import os
import signal

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # before it is imported: no test may ask the network


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread():
    """Sums are then added in one order on every machine, and small tensors are faster."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_reaches_children():
    """A shell starts what runs in its background with Ctrl-C ignored, and children inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
