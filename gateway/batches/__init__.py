"""OpenAI's Batch API: files, batches, and the lines that every gateway takes its share of."""
