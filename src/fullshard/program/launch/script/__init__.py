"""``fullshard launch``: a script of the user as ranks on one machine or several."""
