"""
# What the server of the ranks imports last: from then on nothing that is alive is looked at

Ranks are forked from a server (see `launch.py`) and share its memory, until one of them writes to
a page. Python's collector of cycles writes to each object that it looks at, so each rank would copy
the memory of all libraries. It does not look at what is frozen.
"""

import gc

gc.collect()
gc.freeze()
