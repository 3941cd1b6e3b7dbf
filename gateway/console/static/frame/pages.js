// The pages in the order of the rail: name in the address, title, icon (an SVG path of 24 by 24), and whether the page shows what only
// operators may see. A page is `pages/NAME.js`, and `pages/NAME.css` where `styles` says so; docs/console.md tells what it exports.

export const PAGES = [
  { name: "chat", title: "Chat", icon: "M4 5h16v11H9l-5 4z", styles: true },
  { name: "compare", title: "Compare", icon: "M4 4h6v6H4zM14 4h6v6h-6zM4 14h6v6H4zM14 14h6v6h-6z", styles: true },
  { name: "overview", title: "Overview", icon: "M3 20h18M4 15l5-6 4 4 7-9", operator: true, styles: true },
  { name: "requests", title: "Requests", icon: "M4 6h16M4 12h10M4 18h13", operator: true, styles: true },
  { name: "fleet", title: "Fleet", icon: "M4 4h7v7H4zM13 4h7v7h-7zM4 13h7v7H4zM13 13h7v7h-7z", operator: true, styles: true },
  { name: "models", title: "Models", icon: "M12 3l8 4.500v9L12 21l-8-4.500v-9zM4 7.500l8 4.500 8-4.500M12 12v9", operator: true },
  { name: "planner", title: "Planner", icon: "M7 4v13M3 13l4 4 4-4M17 20V7M13 11l4-4 4 4", operator: true, styles: true },
  { name: "batches", title: "Batches", icon: "M12 3l9 5-9 5-9-5zM3 12l9 5 9-5M3 16.5l9 5 9-5", styles: true },
  { name: "tenants", title: "Keys & tenants", icon: "M14 10a5 5 0 1 0-3.5 4.8L12.5 17H15v2.5h2.5V22H21v-3.500l-7.3-7.2zM8 9h.01", styles: true },
];
