"""FlashInfer-Bench's records: Definition and Solution in, Trace out (docs/reference/flashinfer_bench.md)."""
