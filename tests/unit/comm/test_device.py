"""Devices: the CPU, and CUDA's order of operations with a recorder in place of torch.cuda."""

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fullshard.core.comm import device as device_module, device_of
from fullshard.core.comm.device import HUGE_FROM_BYTES, HUGE_PAGE_BYTES, CudaDevice, Device
from fullshard.errors import ConfigError

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)

linux = pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux")


def released(numel):
    values = torch.ones(numel)
    values.untyped_storage().resize_(0)
    return values, values.untyped_storage()


# CPU


def test_memory_comes_and_goes_under_the_views_of_it():
    device = device_of(CPU)
    values, storage = released(6)
    device.allocate(storage, 24)
    rows = values.view(2, 3)
    values.fill_(3)
    assert rows.sum() == 18
    device.release(storage)
    assert storage.nbytes() == 0
    device.allocate(storage, 24)
    values.fill_(4)
    assert rows.sum() == 24


@linux
def test_huge_pages_are_asked_for_inside_the_buffer_and_only_for_large_ones(monkeypatch):
    asked = []
    monkeypatch.setattr(device_module, "_madvise", lambda *arguments: asked.append(arguments))
    small, small_storage = released(HUGE_FROM_BYTES // 4 - 1)
    device_of(CPU).allocate(small_storage, small.nbytes)
    device_of(torch.device("meta")).allocate(torch.empty(1, device="meta").untyped_storage(), HUGE_FROM_BYTES)
    assert asked == []
    for nbytes in (HUGE_FROM_BYTES, 5 * HUGE_PAGE_BYTES + 12):
        values, storage = released(nbytes // 4)
        device_of(CPU).allocate(storage, nbytes)
        ((first, length, advice),) = asked
        asked.clear()
        last = values.data_ptr() + nbytes
        assert advice == 14  # MADV_HUGEPAGE
        assert first % HUGE_PAGE_BYTES == length % HUGE_PAGE_BYTES == 0
        assert 0 <= first - values.data_ptr() < HUGE_PAGE_BYTES
        assert 0 <= last - (first + length) < HUGE_PAGE_BYTES


@linux
def test_linux_takes_the_advice():
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this kernel has no huge pages")
    values, storage = released(16 * HUGE_PAGE_BYTES)
    device_of(CPU).allocate(storage, values.nbytes)
    assert "hg" in _flags_of_mapping(values.data_ptr() + HUGE_PAGE_BYTES)


def _flags_of_mapping(address):
    """What the kernel says of the memory at ``address``."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, *rest = line.split()
        if not head.endswith(":"):
            low, high = (int(edge, 16) for edge in head.split("-"))
            inside = low <= address < high
        elif inside and head == "VmFlags:":
            return rest
    raise AssertionError(f"no mapping holds {address:#x}")


def test_work_aside_is_done_when_it_is_waited_for_and_host_memory_is_what_it_was():
    device, done, values = device_of(CPU), [], torch.ones(2)
    work = device.on_side_stream("replicate", lambda: done.append(1))
    assert done == []
    work.wait()
    work.wait()
    assert done == [1]
    device.host_ready()
    assert device.pin(values) is values


@pytest.mark.parametrize(
    ("capabilities", "native", "text"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, True, "This CPU computes bfloat16 in hardware (avx512_bf16)."),
        ({"bf16": True, "sve_bf16": True}, True, "This CPU computes bfloat16 in hardware (sve_bf16, bf16)."),
        ({"avx2": True}, False, "This CPU has no bfloat16 arithmetic: it is emulated, which is slower than float32."),
    ],
)
def test_bf16_on_cpu(capabilities, native, text, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert device_of(CPU).supports_bf16() == (native, text)


def test_the_real_cpu_answers():
    native, text = device_of(CPU).supports_bf16()
    assert isinstance(native, bool)
    assert text.startswith("This CPU ")


def test_devices_that_nothing_is_known_of_are_refused():
    with pytest.raises(ConfigError, match="'cuda', 'cpu' or 'meta'; got device 'xpu:1'"):
        device_of(torch.device("xpu", 1))
    assert isinstance(device_of(torch.device("meta")), Device)


# CUDA, played


class PlayedCuda:
    """Takes the place of ``torch.cuda``: streams and events that say in ``log`` what was asked of them."""

    def __init__(self):
        self.log = []
        self.now = PlayedStream(self, "compute")
        self.made = 0

    def Stream(self, device):
        assert device == CUDA
        self.made += 1
        return PlayedStream(self, f"side {self.made}")

    def Event(self):
        return PlayedEvent(self)

    def current_device(self):
        return 0

    def current_stream(self, device):
        assert device == CUDA
        return self.now

    @contextmanager
    def stream(self, stream):
        before, self.now = self.now, stream
        yield
        self.now = before

    @contextmanager
    def device(self, device):
        assert device == CUDA
        yield

    def is_bf16_supported(self, including_emulation):
        return self.get_device_capability(CUDA)[0] >= 8 or including_emulation

    def get_device_capability(self, _device):
        return (7, 5)

    def get_device_name(self, _device):
        return "Tesla T4"


class PlayedStream:
    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def wait_stream(self, other):
        self.cuda.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.cuda.log.append(f"{self.name} waits for event of {event.stream.name}")

    def synchronize(self):
        self.cuda.log.append(f"CPU waits for {self.name}")


class PlayedEvent:
    def __init__(self, cuda):
        self.cuda = cuda

    def record(self, stream):
        self.stream = stream
        self.cuda.log.append(f"event on {stream.name}")

    def synchronize(self):
        self.cuda.log.append(f"CPU waits for event of {self.stream.name}")


@pytest.fixture
def cuda(monkeypatch):
    played = PlayedCuda()
    for name in (
        "Stream", "Event", "current_device", "current_stream", "stream", "device", "is_bf16_supported",
        "get_device_capability", "get_device_name",
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, getattr(played, name))
    return played


def test_work_aside_comes_after_compute_and_compute_waits_for_it(cuda):
    device = device_of(torch.device("cuda"))
    assert isinstance(device, CudaDevice)
    assert device.device == CUDA
    work = device.on_side_stream("replicate", lambda: cuda.log.append(f"work on {cuda.now.name}"))
    assert cuda.log == ["side 1 waits for compute", "work on side 1", "event on side 1"]
    assert cuda.now.name == "compute"
    cuda.log.clear()
    work.wait()
    assert cuda.log == ["compute waits for event of side 1"]
    device.on_side_stream("replicate", lambda: None)
    assert cuda.made == 1
    device.on_side_stream("offload", lambda: None)
    assert cuda.made == 2


def test_what_work_aside_holds_lives_until_it_was_waited_for(cuda):
    storage_gone = []
    values = torch.ones(3)

    class Tells:
        def __init__(self, values):
            self.values = values

        def __call__(self):
            self.values.sum()

        def __del__(self):
            storage_gone.append(True)

    work = device_of(CUDA).on_side_stream("replicate", Tells(values))
    assert storage_gone == []
    work.wait()
    assert storage_gone == [True]


def test_the_cpu_waits_for_host_copies_only(cuda):
    device = device_of(CUDA)
    device.host_ready()
    device.on_side_stream("replicate", lambda: None)
    device.on_side_stream("offload", lambda: None)
    cuda.log.clear()
    device.host_ready()
    assert cuda.log == ["CPU waits for side 2"]


class PlayedWork:
    def __init__(self, cuda):
        self.cuda = cuda

    def wait(self):
        self.cuda.log.append(f"{self.cuda.now.name} waits for the collective")


@pytest.fixture
def _no_pinned(monkeypatch):
    plain = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory, **options: plain(*args, **options))


@pytest.mark.usefixtures("_no_pinned")
def test_numbers_are_read_when_their_collective_is_over_and_not_behind_compute(cuda):
    numbers = torch.tensor([3, 5])
    read = device_of(CUDA).read_later(PlayedWork(cuda), numbers)
    assert cuda.log == ["side 1 waits for compute", "side 1 waits for the collective", "event on side 1"]
    cuda.log.clear()
    numbers.zero_()  # after the copy
    assert read() == [3, 5]
    assert cuda.log == ["CPU waits for event of side 1"]


def test_on_the_cpu_numbers_are_read_when_asked(cuda):
    numbers = torch.tensor([3, 5])
    read = device_of(CPU).read_later(PlayedWork(cuda), numbers)
    assert cuda.log == []
    numbers.add_(1)  # by the collective, say
    assert read() == [4, 6]
    assert cuda.log == ["compute waits for the collective"]


def test_work_that_another_thread_does_comes_after_compute_and_on_its_stream(cuda):
    work = device_of(CUDA).for_thread(lambda: cuda.log.append(f"work on {cuda.now.name}") or 7)
    assert cuda.log == ["event on compute"]
    cuda.log.clear()
    cuda.now = PlayedStream(cuda, "default")  # of the other thread
    assert work() == 7
    assert cuda.log == ["CPU waits for event of compute", "work on compute"]
    assert cuda.now.name == "default"


def test_bf16_on_cuda(cuda, monkeypatch):
    assert device_of(CUDA).supports_bf16() == (
        False,
        "Tesla T4 (compute capability 7.5) has no bfloat16 arithmetic, which needs compute capability 8.0.",
    )
    monkeypatch.setattr(cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    assert device_of(CUDA).supports_bf16() == (True, "Tesla T4 (compute capability 9.0) computes bfloat16 in hardware.")


# CUDA


@pytest.fixture
def real():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return device_of(torch.device("cuda"))


@pytest.mark.gpu
def test_cuda_memory_comes_and_goes(real):
    values = torch.ones(1 << 20, device=real.device)
    storage, before = values.untyped_storage(), torch.cuda.memory_allocated(real.device)
    real.release(storage)
    assert torch.cuda.memory_allocated(real.device) == before - (4 << 20)
    real.allocate(storage, 4 << 20)
    assert values.fill_(2).sum().item() == 2 << 20


@pytest.mark.gpu
def test_cuda_work_aside_is_ordered(real):
    total = torch.zeros(1 << 20, device=real.device)
    for step in range(1, 20):
        torch.cuda._sleep(1_000_000)  # compute is late
        total.fill_(step)

        def work(values=total):
            torch.cuda._sleep(1_000_000)  # the side stream is late
            values.add_(1)

        real.on_side_stream("replicate", work).wait()
        assert total.mul_(2).sum().item() == 2 * (step + 1) * total.numel()


@pytest.mark.gpu
def test_cuda_copies_reach_pinned_memory(real):
    values = torch.arange(1 << 20, device=real.device)
    host = real.pin(torch.zeros(1 << 20, dtype=torch.int64))
    assert host.is_pinned()
    torch.cuda._sleep(10_000_000)
    values.add_(1)
    real.on_side_stream("offload", lambda: host.copy_(values, non_blocking=True))
    real.host_ready()
    assert host[-1].item() == 1 << 20
    native, text = real.supports_bf16()
    assert ("in hardware" in text) is native


@pytest.mark.gpu
def test_cuda_numbers_are_read_while_compute_goes_on(real):
    class Nothing:
        def wait(self):
            pass

    numbers = torch.tensor([1, 2], device=real.device)
    torch.cuda._sleep(10_000_000)  # compute is late with the numbers
    numbers.mul_(10)
    read = real.read_later(Nothing(), numbers)
    torch.cuda._sleep(2_000_000_000)  # about a second
    late = torch.cuda.Event()
    late.record()
    assert read() == [10, 20]
    assert not late.query()
