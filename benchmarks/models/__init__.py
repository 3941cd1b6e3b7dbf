"""Several models behind one gateway: loaded, unloaded, shared out."""
