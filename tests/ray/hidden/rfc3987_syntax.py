"""Hides the package of this name from Ray's processes, which would import it through jsonschema.

The import takes 3 s of CPU time, and Ray gives up on a node whose processes take 15 s to start.
"""

raise ImportError("hidden from the processes of Ray")
