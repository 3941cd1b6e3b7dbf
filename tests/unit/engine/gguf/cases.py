"""Checkpoints that are compared with the files that llama.cpp's converter makes of them."""

from __future__ import annotations

from tests.unit.engine.families import dense, experts, hybrids, vision
from tests.unit.engine.families.case import Case

NO_LIMITS = hybrids.ODD_MAMBA | {"time_step_limit": None}
OF_V3 = next(case.fields for case in experts.CASES if case.name == "deepseek_v3")
# What files can't say is left out of these: limits of Mamba's steps, and a second magnitude of yarn.
OWN: tuple[Case, ...] = (
    Case(
        name="deepseek_v3, one magnitude",
        config="DeepseekV3Config",
        fields={**OF_V3, "rope_parameters": {**OF_V3["rope_parameters"], "mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    Case(
        name="granite4, odd states",
        config="GraniteMoeHybridConfig",
        fields=hybrids.GRANITE_4 | hybrids.NO_EXPERTS | NO_LIMITS | {"layer_types": hybrids.LAST_IS_LINEAR},
    ),
    Case(
        name="nemotron_h, experts of fewer features",
        config="NemotronHConfig",
        fields=hybrids.NEMOTRON_H
        | {"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"], "moe_latent_size": 24},
    ),
)
CASES = {case.name: case for case in (*dense.CASES, *experts.CASES, *hybrids.CASES, *vision.CASES, *OWN)}
