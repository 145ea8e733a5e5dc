"""Hides the package of this name from Ray's processes, each of which would import it through
jsonschema: it takes 3 s of a core, and Ray gives up on a node whose processes take 15 s to start.
"""

raise ImportError("hidden from the processes of Ray")
