"""The Open Inference Protocol (V2) as data: datatypes, tensors, messages and their codecs. No I/O, no asyncio."""
