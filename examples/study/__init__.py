"""The study: does a projection add anything to replay, and what does it cost?"""
