"""Time prediction: machines, measured or known by datasheets, roofline limits, and corrections of these."""
