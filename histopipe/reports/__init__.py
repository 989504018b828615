"""What a person looks at: heatmaps and pages."""
