"""Reports as pages of HTML that need nothing but themselves: no script, no font, no picture from elsewhere.

They are read on screens of any width, dark or light, and on paper.
"""
