"""Settings of `baton doctor`."""

from __future__ import annotations

from pydantic import Field

from cli.reach import ClientOptions
from common.settings import Port
from services.runtime.settings import ModelSettings
from services.worker.options import Device


class DoctorSettings(ModelSettings, ClientOptions):
    """`baton doctor`: checks this machine, and a `baton up` that runs, and says what to fix."""

    device: Device = Field("cpu", description="cpu, or cuda: check torch and the GPUs as well")
    host: str = Field("127.0.0.1", description="address of the gateway's port")
    port: Port = Field(8000, description="port that must be free, unless a gateway is known; 0: not checked")
    print_json: bool = Field(False, description="print JSON")
