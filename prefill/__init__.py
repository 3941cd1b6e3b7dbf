"""The prompt role: pull a job, compute its KV in chunks, push the blocks, pass the sequence on."""
