"""The paper's experiments: presets, a runner that resumes, and a report."""
