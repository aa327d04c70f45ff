"""Time prediction: calibrated machines, roofline limits, and a learned correction between the two."""
