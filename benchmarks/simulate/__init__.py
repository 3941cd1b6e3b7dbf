"""A fleet in a virtual clock: the real placement, admission, planner and block pool around modelled devices."""
