"""The prefill role: pull a job, compute its KV in chunks, push the blocks, hand the sequence off."""
