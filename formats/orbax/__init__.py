"""Orbax's layout, written and read without Orbax and without JAX: through our own storage, and through TensorStore.

    crc32c     the checksum that ends a chunk
    grid       which chunks an array is cut into
    names      how parts of a state are called there, and which names cannot be kept apart
    metadata   the JSON files
    layout     the format `orbax`

Source of the layout: orbax-checkpoint 0.12 (`_src/serialization`, `_src/metadata`), the zarr specification, version 3.
"""
