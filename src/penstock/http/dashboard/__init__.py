"""The dashboard: what is wrong, why, and what to do about it, in a browser.

`penstock server` has it at `/`; `create_dashboard` makes it for another application, `penstock dashboard` serves it alone.
"""
