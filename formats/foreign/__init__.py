"""Checkpoints that others wrote: opened by kind, read by regions, never changed.

base          what a foreign checkpoint is to the manager
orbax_files   Orbax's, version 0 and 1, through TensorStore
safetensors_files   a safetensors file, or a Hugging Face directory with its index
torch_files   what torch.save wrote, as torch.load(weights_only=True) reads it
torch_objects   the same where it holds objects, which are not made; torch_archive finds tensors in such files
xlafsdp_files   what torch_xla's FSDP saved, a file a rank
dcp_files     directories of torch.distributed.checkpoint; dcp_metadata reads their pickle with types of our own
opening       finds out which of them a path is
"""
