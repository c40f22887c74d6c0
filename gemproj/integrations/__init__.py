"""gemproj in the training loops of other libraries; each module needs only its own library."""
