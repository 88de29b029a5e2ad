"""Events that fail on demand, on a virtual device."""

from __future__ import annotations

from stress.device import VirtualDevice, VirtualEvent, VirtualStream


class FaultyEvents:
    """An event factory that fails while `fail_make` is set, and whose events fail to record under `fail_record`."""

    def __init__(self, device: VirtualDevice) -> None:
        self.device = device
        self.fail_make = False
        self.fail_record = False
        self.made: list[FaultyEvent] = []

    def __call__(self) -> FaultyEvent:
        if self.fail_make:
            raise RuntimeError("out of events")
        event = FaultyEvent(self.device, self)
        self.made.append(event)
        return event


class FaultyEvent(VirtualEvent):
    """An event of `FaultyEvents`. It counts how often it was asked."""

    def __init__(self, device: VirtualDevice, owner: FaultyEvents) -> None:
        super().__init__(device)
        self._owner = owner
        self.broken = False
        self.num_queries = 0
        self.num_records = 0

    def record(self, stream: VirtualStream | None = None) -> None:
        if self._owner.fail_record:
            raise RuntimeError("the device is lost")
        self.num_records += 1
        super().record(stream)

    def query(self) -> bool:
        self.num_queries += 1
        if self.broken:
            raise RuntimeError("the device is lost")
        return super().query()
