"""What OpenAI's Responses API keeps: responses, their events while they are made, conversations."""
