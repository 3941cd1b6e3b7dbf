"""A pass as data: the words packed for it, and its inputs as views of them on the device."""
