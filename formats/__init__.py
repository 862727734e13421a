"""Formats: how a checkpoint lies on disk. Knows no process group, no device and no manager."""
