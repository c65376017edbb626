"""What a look at a machine is made of: what it is asked by, a check, what one finds, versions that go together.

Each kind of device brings checks of its own (`megarl.platform`), which stand on this as the doctor's do.
"""
