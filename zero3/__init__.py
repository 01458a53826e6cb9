from zero3.layer import Zero3Layer, Zero3Sequential

__all__ = ["Zero3Layer", "Zero3Sequential"]
