"""Trainers of others that save and restore through safepoint.

Each module needs the package that it is named after, which the extra of that name installs. Nothing else of safepoint
imports them.
"""
