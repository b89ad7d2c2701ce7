"""Live drift: a share of the requests run again on the fp32 reference and compared."""
